"""Storages out to the host and back: by hand (`SwapEnv`, `pageout`, `prefetch`) and by itself (`enable`)."""

from __future__ import annotations

import atexit

from torch_lms._core import core
from torch_lms.memory_sizes import parse_bytes
from torch_lms.swap import mlms
from torch_lms.swap.automatic import count_cpu_allocations, disable, enable, is_enabled
from torch_lms.swap.chaos import enable_from_environment
from torch_lms.swap.environment import SwapEnv
from torch_lms.swap.manual import is_resident, pageout, pin, prefetch, state, unpin, wait
from torch_lms.swap.planning import current_plan
from torch_lms.swap.statistics import SwapStats, stats
from torch_lms.swap.summary import memory_summary

__all__ = [
    "SwapEnv",
    "SwapStats",
    "count_cpu_allocations",
    "current_plan",
    "disable",
    "enable",
    "is_enabled",
    "is_resident",
    "memory_summary",
    "mlms",
    "pageout",
    "parse_bytes",
    "pin",
    "prefetch",
    "state",
    "stats",
    "unpin",
    "wait",
]

# The workers use CUDA and the host pool: they end before either is torn down.
atexit.register(core.shutdown)
enable_from_environment()
