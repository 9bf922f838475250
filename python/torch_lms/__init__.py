"""torch_lms: Large Model Support for PyTorch.

Tensor storages move between device and host on their own, on time, without changing a result.

    import torch_lms
    torch_lms.enable(limit="24GiB")
"""

from __future__ import annotations

from torch_lms.swap import SwapEnv, disable, enable, pageout, pin, prefetch, stats, wait

__all__ = ["SwapEnv", "disable", "enable", "pageout", "pin", "prefetch", "stats", "wait"]

__version__ = "0.1.0"
