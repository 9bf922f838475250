"""Chaos mode, for tests: storages go out at random between ops.

``TORCH_LMS_CHAOS=1`` turns it on when `torch_lms` is imported; ``TORCH_LMS_CHAOS_SEED`` (0) seeds it and
``TORCH_LMS_CHAOS_PERIOD`` (8) is the mean number of ops between two page-outs. A program must give the
same results with it as without.
"""

from __future__ import annotations

import os

from torch_lms._core import core, need_extension
from torch_lms.swap import intercepts, planning

__all__ = ["enable_from_environment"]


def enable_from_environment() -> bool:
    """Turns chaos mode on if the environment asks for it; returns whether it did."""
    if os.environ.get("TORCH_LMS_CHAOS") != "1":
        return False
    need_extension("chaos mode", "unset TORCH_LMS_CHAOS")
    intercepts.install()
    planning.bring_back_before_forks()
    core.enable_chaos(
        int(os.environ.get("TORCH_LMS_CHAOS_SEED", "0")),
        int(os.environ.get("TORCH_LMS_CHAOS_PERIOD", "8")),
    )
    return True
