"""The least lost time for each byte and place that is relieved, again and again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torch_lms.plan.problem import Choices, Problem
from torch_lms.plan.relief import Offer, relieve

__all__ = ["greedy", "least_loss"]

Floats = NDArray[np.float64]
_TINY = 1e-9


def greedy(problem: Problem) -> Choices:
    """Swaps that hide behind compute first, those that are dear to recompute before others; then whatever is cheapest.

    Args:
        problem: what is asked.
    """
    return relieve(problem, {}, problem.excess({}), least_loss)


def least_loss(offer: Offer) -> tuple[Floats, Floats]:
    """Ranks by time lost for each byte at the places that need it; a swap that loses none, by what it spares."""
    useful = np.maximum(offer.needy, _TINY)
    spared = np.where(np.isfinite(offer.replay_us), offer.replay_us, 0.0) / np.maximum(offer.replay_bytes, 1.0)
    spared = np.where(np.isfinite(offer.replay_us), spared, 1.0)
    swap = offer.swap_us / np.maximum(offer.swap_bytes, 1.0) / useful
    swap = np.where(offer.swap_us <= 0.0, -spared * useful, swap)
    replay = offer.replay_us / np.maximum(offer.replay_bytes, 1.0) / useful
    return swap, replay
