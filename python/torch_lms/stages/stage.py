"""A stage: a part of a model, as a module whose code is generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from torch_lms.stages.arguments import Argument
from torch_lms.stages.placement import Placement
from torch_lms.stages.stage_code import StageCode, with_device

__all__ = ["Borders", "Stage"]


@dataclass
class Borders:
    """What each stage takes, computes and gives."""

    nodes: list[list[fx.Node]]
    incoming: list[tuple[str, ...]] = field(default_factory=list)
    outgoing: list[tuple[str, ...]] = field(default_factory=list)
    feeds: list[tuple[str, ...]] = field(default_factory=list)
    arguments: tuple[Argument, ...] = ()


class Stage(nn.Module):
    """A part of a model, with generated code.

    Attributes:
        index: place in the pipeline, from 0.
        count: number of stages.
        inputs: names of values that come from the stage before.
        outputs: names of values that go to the stage after; empty for the last stage, which returns what the model
            returns.
        feeds: names of arguments of the model that the stage uses itself; they follow the inputs.
        arguments: all arguments of the model.
        nodes: names of the graph's nodes that it computes, in order.
        shared: parameters and buffers that other stages have too: own name to (stage, name there).
        device: where it is and its code makes tensors; None for a part of a model on several devices, until it is
            materialised.
        placement: the device and the rank that it was put on; None until then.
    """

    def __init__(self, *, index: int, count: int, code: StageCode, borders: Borders) -> None:
        super().__init__()
        self.index = index
        self.count = count
        self.inputs = borders.incoming[index]
        self.outputs = borders.outgoing[index]
        self.feeds = borders.feeds[index]
        self.arguments = borders.arguments
        self.nodes = tuple(node.name for node in borders.nodes[index])
        self.shared: dict[str, tuple[tuple[int, str], ...]] = {}
        self.device: torch.device | None = None
        self.placement: Placement | None = None
        self.set_code(code)

    def set_code(self, code: StageCode) -> None:
        """Exchanges the code that runs."""
        self._code = code
        self._run = code.compile()

    def set_device(self, device: torch.device) -> None:
        """Notes the device that the stage is on, and has its code make tensors there."""
        if self.device not in (None, device):
            self.set_code(with_device(self._code, self.device, device))
        self.device = device

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Stage:
        super()._apply(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        if self.device is not None:
            self.set_device(fn(torch.empty(0, device=self.device)).device)
        return self

    @property
    def code(self) -> str:
        """The generated Python source of ``forward``."""
        return self._code.source

    @property
    def generated(self) -> StageCode:
        """The code with the names that it uses."""
        return self._code

    def save_code(self, path: str | Path) -> None:
        """Writes the generated source, for reading."""
        taken, given = ", ".join(self.inputs + self.feeds), ", ".join(self.outputs) or "what the model returns"
        Path(path).write_text(f"# Stage {self.index} of {self.count}: takes {taken}; gives {given}.\n{self.code}")

    def forward(self, *values: Any, **feeds: Any) -> Any:
        """Runs the stage on its inputs and feeds; one output alone comes bare, several as a tuple."""
        return self._run(self, *values, **feeds)

    def extra_repr(self) -> str:
        """Place and borders."""
        return f"{self.index} of {self.count}, inputs={self.inputs}, outputs={self.outputs}, feeds={self.feeds}"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call, unused-ignore]
        self._run = self._code.compile()
