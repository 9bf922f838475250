"""A stage: a part of a model, as a module whose code is generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from torch_lms.errors import PartitionError
from torch_lms.profile.graph_code import Generated, GraphCode
from torch_lms.stages.arguments import Argument
from torch_lms.stages.extra_state import KeepsExtraState
from torch_lms.stages.modes import refuse_mode
from torch_lms.stages.own_modes import SetsModes
from torch_lms.stages.placement import Placement

__all__ = ["Borders", "Stage", "own_name"]

# Note [Names that the stage has for itself]: a model may have a module, parameter or buffer called `shared` or
# `device`, as a stage has an attribute. State dicts and optimizers find it under its name, the code as
# `self.own.shared`.
_TAKEN = frozenset(
    [
        "index",
        "count",
        "inputs",
        "outputs",
        "feeds",
        "arguments",
        "nodes",
        "order",
        "fixed",
        "why_fixed",
        "shared",
        "device",
        "placement",
        "set_code",
        "set_device",
        "make_on",
        "code",
        "generated",
        "save_code",
        "check_shapes",
        "check_modes",
        "own",
        "hold",
        "sizes",
        "shapes",
        "twins",
        "writes",
        "_code",
        "_run",
        "_constants",
    ]
)


def own_name(target: str) -> str:
    """How the code of a stage calls an attribute of the model; see Note [Names that the stage has for itself]."""
    return f"own.{target}" if target.partition(".")[0] in _TAKEN else target


@dataclass
class Borders:
    """What each stage takes, computes and gives."""

    nodes: list[list[fx.Node]]
    incoming: list[tuple[str, ...]] = field(default_factory=list)
    outgoing: list[tuple[str, ...]] = field(default_factory=list)
    feeds: list[tuple[str, ...]] = field(default_factory=list)
    arguments: tuple[Argument, ...] = ()
    shapes: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    sizes: frozenset[str] = frozenset()
    writes: list[frozenset[str]] = field(default_factory=list)


def _check_shape(name: str, ranges: tuple[tuple[int, float], ...], value: Any) -> None:
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
    if shape is None:
        return
    fits = (low <= size <= high for size, (low, high) in zip(shape, ranges, strict=False))
    if len(shape) != len(ranges) or not all(fits):
        wanted = ", ".join(
            str(low) if low == high else f"at least {low}" if high == float("inf") else f"{low} to {high:.0f}"
            for low, high in ranges
        )
        raise PartitionError(
            f"expected {name!r} of shape [{wanted}], for which the model was traced, found {list(shape)}; give it that "
            "shape, or trace the model with a sample of the new one"
        )


class _Own:
    """Looks names up among what a stage holds of the model."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        stage = self._stage
        for held in (stage._modules, stage._parameters, stage._buffers, stage._constants):
            if name in held:
                return held[name]
        raise AttributeError(f"expected a module, parameter or buffer {name!r} in stage {stage.index}, found none")


class Stage(SetsModes, KeepsExtraState, Generated):
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
        fixed: by path of a module, the only mode of it that the code is for; see Note [Modes] in ``modes``.
        why_fixed: what a `train` of the model's own does that stages cannot; empty if none does.
        order: names of all that the model holds, in its order.
        shared: parameters and buffers that other stages have too: own name to (stage, name there).
        twins: of each module that the model has under several names, these.
        sizes: names among inputs and outputs that are numbers made of tensors' sizes: the same while shapes are.
        shapes: of each feed the least and the largest size of each dimension that the code is for; a feed that is not
            in it may have any shape with which the model runs.
        writes: names of the model's parameters and buffers that its forward changes, or may.
        device: where it is and its code makes tensors; None for a part of a model on several devices, until it is
            materialised.
        placement: the device and the rank that it was put on; None until then.
    """

    def __init__(self, *, index: int, count: int, code: GraphCode, borders: Borders) -> None:
        super().__init__()
        self.index = index
        self.count = count
        self.inputs = borders.incoming[index]
        self.outputs = borders.outgoing[index]
        self.feeds = borders.feeds[index]
        self.arguments = borders.arguments
        self.sizes = borders.sizes & {*self.inputs, *self.outputs}
        self.shapes = {name: borders.shapes[name] for name in self.feeds if name in borders.shapes}
        self.writes = borders.writes[index] if borders.writes else frozenset()
        self.nodes = tuple(node.name for node in borders.nodes[index])
        self.fixed: dict[str, bool] = {}
        self.why_fixed = ""
        self.order: tuple[str, ...] = ()
        self.shared: dict[str, tuple[tuple[int, str], ...]] = {}
        self.twins: tuple[tuple[str, ...], ...] = ()
        self.device: torch.device | None = None
        self.placement: Placement | None = None
        self._constants: dict[str, Any] = {}
        self.set_code(code)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _TAKEN:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def own(self) -> _Own:
        """The model's attributes, also under names that the stage has for itself."""
        return _Own(self)

    def hold(self, name: str, value: Any) -> None:
        """Sets a module, parameter or constant of the model under any name; buffers are registered first."""
        if isinstance(value, nn.Parameter):
            self._parameters[name] = value
        elif isinstance(value, nn.Module):
            self._modules[name] = value
        elif name in self._buffers:
            self._buffers[name] = value
        elif name in _TAKEN:
            self._constants[name] = value
        else:
            setattr(self, name, value)

    def get_submodule(self, target: str) -> nn.Module:
        """As of `nn.Module`, also under names that the stage has for itself."""
        first, _, rest = target.partition(".")
        found = self._modules.get(first)
        return super().get_submodule(target) if found is None else found.get_submodule(rest)

    def set_device(self, device: torch.device) -> None:
        """Notes the device that the stage is on, and has its code make tensors there, with that of modules inside."""
        if self.device not in (None, device):
            for module in self.modules():
                if isinstance(module, Generated):
                    module.make_on(device, self.device)
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

    def save_code(self, path: str | Path) -> None:
        """Writes the generated source, for reading."""
        taken, given = ", ".join(self.inputs + self.feeds), ", ".join(self.outputs) or "what the model returns"
        Path(path).write_text(f"# Stage {self.index} of {self.count}: takes {taken}; gives {given}.\n{self.code}")

    def check_shapes(self, feeds: Mapping[str, Any]) -> None:
        """Looks whether the code is for feeds of these shapes; those that are left out are right.

        Raises:
            PartitionError: for a feed of another shape.
        """
        for name, ranges in self.shapes.items():
            _check_shape(name, ranges, feeds.get(name))

    def check_modes(self) -> None:
        """Looks whether the code is for the modes that the stage's modules are in: training or evaluation.

        Raises:
            PartitionError: if it is not.
        """
        for path, mode in self.fixed.items():
            if self.get_submodule(path).training is not mode:
                refuse_mode(path, mode, self.index, self.why_fixed)

    def forward(self, *values: Any, **feeds: Any) -> Any:
        """Runs the stage on its inputs and feeds; one output alone comes bare, several as a tuple.

        Raises:
            PartitionError: for a feed of a shape that the trace is not for, or in a mode that the code is not
                for.
        """
        self.check_shapes(feeds)
        self.check_modes()
        return self._run(self, *values, **feeds)

    def extra_repr(self) -> str:
        """Place and borders."""
        return f"{self.index} of {self.count}, inputs={self.inputs}, outputs={self.outputs}, feeds={self.feeds}"
