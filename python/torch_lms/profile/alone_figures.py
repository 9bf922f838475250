"""What is measured of nodes that run alone, as fields of a profile: `AloneFigures`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_lms.profile.alone import Alone
from torch_lms.profile.timing import Clock
from torch_lms.profile.two_parts import NO_WEIGHTS, PartShares, part_shares
from torch_lms.profile.working_space import NOT_MEASURED, WorkingSpace, working_space

__all__ = ["AloneFigures", "Found", "measure_alone"]

Found = tuple[WorkingSpace, PartShares | None]


def measure_alone(device: torch.device, time_parts: Clock | None, accumulate: bool, node: Alone) -> Found:
    """The working space of a node and, with a clock for it and where it runs, the two parts of its backward."""
    space = working_space(device, node)
    return space, None if time_parts is None or space.why else part_shares(time_parts, accumulate, node)


@dataclass(frozen=True)
class AloneFigures:
    """Of all nodes.

    Attributes:
        found: by the nodes' names.
        in_parts: whether backwards are timed in two parts.
    """

    found: Mapping[str, Found] = field(default_factory=dict)
    in_parts: bool = False

    def fields(self, name: str, backward_us: float) -> dict[str, Any]:
        """Those of a node's profile.

        Args:
            name: of the node.
            backward_us: what its backward takes as a whole.
        """
        space, shares = self.found.get(name, (NOT_MEASURED, NO_WEIGHTS))
        made: dict[str, Any] = {
            "forward_working_bytes": space.forward_bytes,
            "backward_working_bytes": space.backward_bytes,
        }
        if self.in_parts and shares is not None:
            made["input_backward_us"], made["weight_backward_us"] = (share * backward_us for share in shares)
        return made

    def notes(self) -> list[str]:
        """What could not be measured, once for each reason."""
        first: dict[str, str] = {}
        for name, (space, _) in self.found.items():
            if space.why:
                first.setdefault(space.why, name)
        return [
            f"the backward of {name!r} does not run by itself, so its working space is guessed: {why}"
            for why, name in first.items()
        ]
