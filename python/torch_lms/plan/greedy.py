"""The least lost time for each byte and place that is relieved, again and again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from torch_lms.plan.problem import Choices, Problem
from torch_lms.plan.relief import Offer, relieve

__all__ = ["exact_greedy", "greedy", "least_loss"]

Floats = NDArray[np.float64]
_TINY = 1e-9


def greedy(problem: Problem) -> Choices:
    """Swaps that hide behind compute first, those that are dear to recompute before others; then whatever is cheapest.

    Args:
        problem: what is asked.
    """
    return relieve(problem, {}, problem.excess({}), least_loss)


def exact_greedy(problem: Problem) -> Choices:
    """The same, where bytes beyond the excess count for nothing: for programs of few, large storages.

    Args:
        problem: what is asked.
    """
    return relieve(problem, {}, problem.excess({}), _least_waste)


def _least_waste(offer: Offer) -> tuple[Floats, Floats]:
    swap_bytes, replay_bytes = (np.minimum(one, offer.most_bytes) for one in (offer.swap_bytes, offer.replay_bytes))
    return least_loss(replace(offer, swap_bytes=swap_bytes, replay_bytes=replay_bytes))


def least_loss(offer: Offer) -> tuple[Floats, Floats]:
    """Ranks by time lost for each byte at the places that need it; a swap that loses none, by what it spares."""
    useful = np.maximum(offer.needy, _TINY)
    replay_us, swap_us = offer.replay_us + offer.replay_beside_us, offer.swap_us + offer.swap_beside_us
    spared = np.where(np.isfinite(replay_us), replay_us, 0.0) / np.maximum(offer.replay_bytes, 1.0)
    spared = np.where(np.isfinite(replay_us), spared, 1.0)
    swap = swap_us / np.maximum(offer.swap_bytes, 1.0) / useful
    swap = np.where(offer.swap_us <= 0.0, swap - spared * useful, swap)
    replay = replay_us / np.maximum(offer.replay_bytes, 1.0) / useful
    return swap, replay
