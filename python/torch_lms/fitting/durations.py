"""How long each op of a recorded step takes: from the profiled times of the model's nodes, or from a device's rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_lms.errors import ProfileError
from torch_lms.fitting.recorder import RecordedOp
from torch_lms.fitting.step import RecordedStep
from torch_lms.plan.trace import Link
from torch_lms.profile.document import Profile

__all__ = ["DeviceRates", "profiled_us", "rated_us"]

_FLOPS_PER_BYTE = 100.0  # what a device computes while it moves a byte: for the shares of ops of one node


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What a device that is not there can do.

    Attributes:
        flops_per_us: of products of matrices, as they run in practice.
        memory_bytes_per_us: that its memory reads and writes.
        link: between it and the host.

    Raises:
        ProfileError: for a rate that is not positive.
    """

    flops_per_us: float
    memory_bytes_per_us: float
    link: Link

    def __post_init__(self) -> None:
        rates = (self.flops_per_us, self.memory_bytes_per_us, self.link.out_bytes_per_us, self.link.in_bytes_per_us)
        if not all(0 < rate < float("inf") for rate in rates):
            raise ProfileError(f"expected rates above 0, found {self}; give what the device does in practice")


def rated_us(step: RecordedStep, rates: DeviceRates) -> list[float]:
    """The time of each op by its operations or its bytes, whichever takes longer."""
    return [max(op.flops / rates.flops_per_us, op.moved_bytes / rates.memory_bytes_per_us) for op in step.ops]


def profiled_us(step: RecordedStep, profile: Profile, memory_bytes_per_us: float) -> list[float]:
    """The time of each op: its share of the time of its node.

    What was measured of nodes that run no op of their own, such as views, is divided among all. An op of no node, as
    those of the optimizer, counts by its bytes.

    Args:
        step: was recorded with the profile's nodes.
        profile: of the same model and sample.
        memory_bytes_per_us: that the device's memory reads and writes.
    """
    durations_us = [op.moved_bytes / memory_bytes_per_us for op in step.ops]
    places: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for span in step.spans:
        places[span.node, span.backward] += range(span.start, span.end)
    nodes_us = {(node.name, False): node.forward_us for node in profile.nodes}
    nodes_us |= {(node.name, True): node.backward_us for node in profile.nodes}
    covered_us = sum(nodes_us.get(key, 0.0) for key, mine in places.items() if mine)
    stretch = sum(nodes_us.values()) / covered_us if covered_us else 0.0
    for key, mine in places.items():
        _divide(stretch * nodes_us.get(key, 0.0), mine, step.ops, durations_us.__setitem__)
    return durations_us


def _divide(
    total_us: float, places: Sequence[int], ops: Sequence[RecordedOp], give: Callable[[int, float], None]
) -> None:
    weights = [ops[place].moved_bytes + ops[place].flops / _FLOPS_PER_BYTE for place in places]
    total = sum(weights)
    for place, weight in zip(places, weights, strict=True):
        give(place, total_us * weight / total if total else total_us / len(places))
