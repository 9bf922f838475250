"""DawnPiper's order: swaps that cost no time first, then by the memory that is saved for each second that is lost.

Source: DawnPiper (arXiv 2505.05856), the section on swap and recomputation, which takes its measure, memory saved per
second, from Capuchin.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torch_lms.plan.problem import Choices, Problem
from torch_lms.plan.relief import Offer, relieve

__all__ = ["dawnpiper", "memory_saving_per_second"]

Floats = NDArray[np.float64]


def dawnpiper(problem: Problem) -> Choices:
    """Free swaps by the length of the time in which nothing uses them; then the most bytes for each second.

    Args:
        problem: what is asked.
    """
    return relieve(problem, {}, problem.excess({}), memory_saving_per_second)


def memory_saving_per_second(offer: Offer) -> tuple[Floats, Floats]:
    """Ranks free swaps by their slack, all others by time for each byte."""
    swap_us = offer.swap_us + offer.swap_beside_us
    swap = swap_us / np.maximum(offer.swap_bytes, 1.0)
    swap = np.where(swap_us <= 0.0, -offer.slack_us, swap)
    replay = (offer.replay_us + offer.replay_beside_us) / np.maximum(offer.replay_bytes, 1.0)
    return swap, replay
