"""Makes the times of nodes add up to what whole steps take: `as_in_steps`.

Note [Nodes add up to the step]: a device that works without a rest is clocked lower, by several percent where its power
is what limits it, and one of a pipeline rests in the bubble only. So a profile rests as long between its runs. While
nodes are timed, with marks between them and Python far ahead, it rests a little more. So where Python is ahead of the
device the nodes' times give the shares, and whole steps of the model itself the time that is shared, forward and
backward each.

Where the device waits for Python, a step takes longer than its nodes, or less long where nodes wait for the device
themselves: then marks make them longer. So nodes are timed once more, with Python no further ahead than it comes by
itself. What one takes longer then is what the device waits in it, and what a step takes longer than its nodes is shared
by that; what it takes less long, by what Python takes for a node, so far as that is not more than the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch_lms.profile.document import NodeProfile, Profile
from torch_lms.profile.steps import StepTime
from torch_lms.profile.timing import NodeTimes

__all__ = ["as_in_steps"]

_AHEAD = 0.05  # the share of a direction's time that Python is ahead at its end, at least, where no device waits for it
_BACKWARDS = ("backward_us", "input_backward_us", "weight_backward_us")


@dataclass(frozen=True)
class _Direction:
    """The forwards or the backwards of nodes, and what they take in whole steps.

    Attributes:
        nodes_us: of each node by itself.
        unhurried: the same, with Python no further ahead of the device than it comes by itself.
        step_us: of a whole step's direction.
        ahead_us: how far Python was ahead at its end.
    """

    nodes_us: Mapping[str, float]
    unhurried: NodeTimes
    step_us: float
    ahead_us: float

    @property
    def waits(self) -> bool:
        """Whether the device waits for Python."""
        return self.ahead_us < _AHEAD * self.step_us

    def in_steps_us(self) -> dict[str, float]:
        """Of each node in a whole step."""
        nodes_us, more_us = self.nodes_us, self.step_us - sum(self.nodes_us.values())
        shares = nodes_us
        if self.waits:
            by_waits = self._waits_us() if more_us > 0 else self._host_us()
            shares = by_waits if sum(by_waits.values()) > max(-more_us, 0.0) else nodes_us
        by = more_us / sum(shares.values()) if nodes_us and self.step_us > 0 else 0.0
        return {name: time_us + by * shares[name] for name, time_us in nodes_us.items()}

    def _waits_us(self) -> dict[str, float]:
        unhurried_us = self.unhurried.device_us
        return {name: max(unhurried_us.get(name, 0.0) - time_us, 0.0) for name, time_us in self.nodes_us.items()}

    def _host_us(self) -> dict[str, float]:
        host_us = self.unhurried.host_us
        return {name: min(host_us.get(name, 0.0), time_us) for name, time_us in self.nodes_us.items()}


def as_in_steps(found: Profile, unhurried: tuple[NodeTimes, NodeTimes], step: StepTime) -> Profile:
    """A profile with the times that its nodes have in whole steps; see Note [Nodes add up to the step].

    Args:
        found: its nodes timed with Python ahead of the device.
        unhurried: their forwards and backwards, with Python no further ahead than it comes by itself.
        step: a whole one.
    """
    directions = [
        _Direction(
            {node.name: getattr(node, f"{name}_us") for node in found.nodes if getattr(node, f"{name}_us")},
            own,
            getattr(step, f"{name}_us"),
            getattr(step, f"{name}_ahead_us"),
        )
        for name, own in zip(("forward", "backward"), unhurried, strict=True)
    ]
    forward_us, backward_us = (direction.in_steps_us() for direction in directions)
    nodes = tuple(
        _with_times(node, forward_us.get(node.name, 0.0), backward_us.get(node.name, 0.0)) for node in found.nodes
    )
    made, before_us = replace(found, nodes=nodes), found.forward_us + found.backward_us
    scale = (made.forward_us + made.backward_us) / before_us if before_us else 1.0
    notes = list(found.notes)
    if any(direction.waits for direction in directions):
        whole, own = f"a step takes {found.step_us:.0f} us", f"its nodes by themselves {before_us:.0f} us"
        notes.append(f"{whole}, {own}: the device waits for Python")
    return replace(made, node_scale=scale, notes=tuple(notes))


def _with_times(node: NodeProfile, forward_us: float, backward_us: float) -> NodeProfile:
    times_us: dict[str, Any] = {"forward_us": forward_us}
    if node.backward_us:
        by = backward_us / node.backward_us
        times_us |= {name: by * time_us for name in _BACKWARDS if (time_us := getattr(node, name)) is not None}
    return replace(node, **times_us)
