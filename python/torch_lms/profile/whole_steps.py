"""Makes the times of nodes add up to what whole steps take: `as_in_steps`.

Note [Nodes add up to the step]: the device rests now and then while nodes are timed, one run after the other, with
marks between the nodes. A device that works without a rest is clocked lower, by several percent where its power is what
limits it, and a stage of a pipeline hardly rests. So the nodes' times give the shares, and whole steps of the model
itself the time that is shared, forward and backward each.

Where the device waits for Python, a step takes longer than its nodes, and not all alike. So nodes are timed once more,
with Python no further ahead than it comes by itself: what one takes longer then is what the device waits in it, and
what a step takes longer than its nodes is shared by that. Marks and the node-by-node run cost Python time as well, so
that these waits are longer than a step's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_lms.profile.document import NodeProfile, Profile
from torch_lms.profile.steps import StepTime

__all__ = ["NodeTimes", "as_in_steps"]

_WAITS = 0.05  # the share of the nodes' times that the device waits, at least, for it to be said to wait
_BACKWARDS = ("backward_us", "input_backward_us", "weight_backward_us")

NodeTimes = Mapping[str, float]  # microseconds by the nodes' names


@dataclass(frozen=True)
class _Factors:
    """What becomes of the times of one direction: each times a number, and a share of each wait more."""

    scale: float
    waits: float

    @classmethod
    def of(cls, nodes_us: float, waits_us: float, step_us: float) -> _Factors:
        """Of the nodes' sum, that of their waits, and what the direction takes in a whole step."""
        if nodes_us <= 0 or step_us <= 0:
            return cls(1.0, 0.0)
        if waits_us < _WAITS * nodes_us or step_us < nodes_us:
            return cls(step_us / nodes_us, 0.0)
        return cls(1.0, (step_us - nodes_us) / waits_us)


def as_in_steps(found: Profile, unhurried: tuple[NodeTimes, NodeTimes], steps: Sequence[StepTime]) -> Profile:
    """A profile with the times that its nodes have in whole steps; see Note [Nodes add up to the step].

    Args:
        found: its nodes timed with Python ahead of the device.
        unhurried: their forwards and backwards timed without that.
        steps: at least one.
    """
    waits = [
        {
            node.name: max(times_us.get(node.name, 0.0) - own_us(node), 0.0) if own_us(node) else 0.0
            for node in found.nodes
        }
        for times_us, own_us in zip(unhurried, (_forward_us, _backward_us), strict=True)
    ]
    forward = _Factors.of(found.forward_us, sum(waits[0].values()), statistics.fmean(one.forward_us for one in steps))
    backward = _Factors.of(
        found.backward_us, sum(waits[1].values()), statistics.fmean(one.backward_us for one in steps)
    )
    nodes = tuple(_scaled(node, forward, waits[0][node.name], backward, waits[1][node.name]) for node in found.nodes)
    before_us = found.forward_us + found.backward_us
    made = replace(found, nodes=nodes)
    scale = (made.forward_us + made.backward_us) / before_us if before_us else 1.0
    notes = list(found.notes)
    if scale > 1 + _WAITS and (forward.waits or backward.waits):
        notes.append(
            f"a step takes {found.step_us:.0f} us, its nodes by themselves {before_us:.0f} us: the device waits for Python"
        )
    return replace(made, node_scale=scale, notes=tuple(notes))


def _forward_us(node: NodeProfile) -> float:
    return node.forward_us


def _backward_us(node: NodeProfile) -> float:
    return node.backward_us


def _scaled(
    node: NodeProfile, forward: _Factors, forward_wait_us: float, backward: _Factors, backward_wait_us: float
) -> NodeProfile:
    times_us: dict[str, Any] = {"forward_us": forward.scale * node.forward_us + forward.waits * forward_wait_us}
    if node.backward_us:
        by = backward.scale + backward.waits * backward_wait_us / node.backward_us
        times_us |= {name: by * time_us for name in _BACKWARDS if (time_us := getattr(node, name)) is not None}
    return replace(node, **times_us)
