"""What a steady cycle asks for if everything comes in only when it is needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_lms.plan.decision import Decision
from torch_lms.plan.residency import steady_cycle
from torch_lms.plan.trace import Trace

__all__ = ["Demand", "find_demand"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Demand:
    """What decisions come to.

    Attributes:
        memory_bytes: in use at each place, if every copy out ends at once.
        replay_us: spent on replays before each op.
        arrivals: the places at which each storage comes in.
        replayed: what is made again before each op.
    """

    memory_bytes: Floats
    replay_us: Floats
    arrivals: Mapping[int, list[int]]
    replayed: Mapping[int, list[int]]


def find_demand(trace: Trace, decisions: Iterable[Decision]) -> Demand:
    """Goes through a steady cycle."""
    cycle, recipes = steady_cycle(trace, decisions), trace.by_storage.recipes
    replay_us = np.zeros(len(trace.ops))
    for place, replayed in cycle.replayed.items():
        replay_us[place] = sum(one.duration_us for storage in replayed if (one := recipes[storage]) is not None)
    arrivals: dict[int, list[int]] = defaultdict(list)
    for place, storages in cycle.arrivals.items():
        for storage in storages:
            arrivals[storage].append(place)
    return Demand(np.array(cycle.memory_bytes, dtype=np.float64), replay_us, arrivals, cycle.replayed)
