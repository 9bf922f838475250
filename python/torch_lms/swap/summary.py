"""What holds the memory of the devices, as a table for people."""

from __future__ import annotations

import torch

from torch_lms._core import core, need_extension
from torch_lms.swap.limits import device_name

__all__ = ["memory_summary"]

_MIB = 1 << 20

# The keys of a report (csrc/extension/policy/MemoryReport.h). Those of the second list make up the allocated
# bytes.
_TOTALS = {
    "limit_bytes": "limit",
    "host_limit_bytes": "limit of what is paged out to the host",
    "reserved_bytes": "reserved by PyTorch's allocator",
    "allocated_bytes": "allocated by tensors, of which",
}
_PARTS = {
    "movable_bytes": "can be paged out",
    "in_use_bytes": "in use by running ops, or by their address",
    "fixed_bytes": "pinned (pin, numpy, DLPack, captured graphs, collectives)",
    "leaving_bytes": "being paged out",
    "unseen_bytes": "not used by any op that was watched",
    "held_bytes": "held for a plan's largest storages",
    "other_bytes": "other (small, private pools, compiled code, not watched)",
}
_ATTENTION = {
    "off": "off",
    "learning": "on, watches the first steps",
    "armed": "on, watches every op",
    "asleep": "on, watches no op: memory has stayed far below the limit",
}
_WIDTH = 2 + max(map(len, _PARTS.values()))


def memory_summary(device: str | torch.device | None = None) -> str:
    """Returns a table of what holds a device's memory now, and of how much could be paged out.

    Example:
        >>> print(torch_lms.memory_summary("cuda:0"))

    Args:
        device: a CPU or CUDA device; by default the CPU, and every CUDA device if CUDA is in use. The
            CPU's tensors are counted only in automatic mode, or after `torch_lms.swap.count_cpu_allocations`.

    Returns:
        Lines of text, sizes in MiB.

    Raises:
        LimitError: for a device that cannot be understood or is not there.
        LmsError: on a PyTorch with the fork's patches, or in a forked child.
    """
    need_extension("memory_summary", "use torch_lms.stats() and torch.cuda.memory_summary()")
    names = _devices() if device is None else [device_name(device)]
    lines = [f"torch_lms: automatic mode is {_ATTENTION[core.attention()]}"]
    for name in names:
        lines += ["", f"{name:<{_WIDTH}} {'MiB':>10}", *_lines_of(core.memory_report(name))]
    lines += ["", _line("paged out to the host, from all devices", core.stats()["paged_out_bytes"])]
    return "\n".join(lines)


def _devices() -> list[str]:
    cuda = core.has_cuda and torch.cuda.is_initialized()
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count() if cuda else 0))]


def _lines_of(report: dict[str, int]) -> list[str]:
    totals = [_line(words, report[key]) for key, words in _TOTALS.items() if key != "limit_bytes" or report[key]]
    if not report["limit_bytes"]:
        totals.insert(0, f"{_TOTALS['limit_bytes']:<{_WIDTH}} {'none':>10}")
    return totals + [_line(f"  {words}", report[key]) for key, words in _PARTS.items()]


def _line(words: str, nbytes: int) -> str:
    return f"{words:<{_WIDTH}} {nbytes / _MIB:>10.1f}"
