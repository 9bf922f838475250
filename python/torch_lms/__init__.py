"""torch_lms: Large Model Support for PyTorch.

Tensor storages move between device and host on their own, on time, without changing a result.

    import torch_lms
    torch_lms.enable(limit="24GiB")

Any thread may call `pageout`, `prefetch`, `pin`, `wait`, `stats`, `current_plan` and `memory_summary`. `enable`,
`disable` and a `SwapEnv` change the whole process: call them from one thread at a time. Models in chunks, stages and
pipelines are for one thread, as modules and optimizers are.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_lms.balanced import create_balanced_partition
    from torch_lms.chunk import chunked
    from torch_lms.fitting import fit
    from torch_lms.swap import (
        SwapEnv,
        current_plan,
        disable,
        enable,
        memory_summary,
        pageout,
        pin,
        prefetch,
        stats,
        wait,
    )

__all__ = [
    "SwapEnv",
    "chunked",
    "create_balanced_partition",
    "current_plan",
    "disable",
    "enable",
    "fit",
    "memory_summary",
    "pageout",
    "pin",
    "prefetch",
    "stats",
    "wait",
]

__version__ = "0.1.0"

# Imported on first use: profiles and partitions also work where there is no compiled core.
_HOME = {
    **dict.fromkeys(__all__, "torch_lms.swap"),
    "chunked": "torch_lms.chunk",
    "create_balanced_partition": "torch_lms.balanced",
    "fit": "torch_lms.fitting",
}
_PACKAGES = ("chunk", "errors", "fitting", "partition", "pipeline", "plan", "profile", "schedules", "stages", "swap")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"torch_lms.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("TORCH_LMS_CHAOS") == "1":
    importlib.import_module("torch_lms.swap")  # turns chaos mode on
