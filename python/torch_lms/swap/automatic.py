"""Automatic mode: any eager program within a limit, with no change to its code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_lms._core import core, need_extension, sees_every_access
from torch_lms.errors import EnvError, LimitError
from torch_lms.memory_sizes import parse_bytes
from torch_lms.plan.document import Plan
from torch_lms.swap import discovery, intercepts, optimizers, planning
from torch_lms.swap.limits import Limit, parse_limits

__all__ = ["change_limit", "count_cpu_allocations", "disable", "enable", "is_enabled", "present_limits"]

_enabled = False
_limits: dict[str, int] = {}  # by device, in bytes
_options: dict[str, Any] = {}  # that hold where one limit is changed
_begun = False  # something that `disable` has to end


def enable(
    limit: Limit | Mapping[str | torch.device, int | str] = None,
    *,
    min_bytes: int | str = 1 << 20,
    host_limit: int | str | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
    expandable_segments: bool = True,
    swap: bool = True,
    recompute: bool = True,
    plan: Plan | str | os.PathLike[str] | None = None,
) -> None:
    """Keeps the memory of tensors within a limit from now on, in this whole process.

    Storages are known from the ops that make and use them. Under pressure those go out that are needed
    last, as the program's last cycle showed; where nothing is known, the least recently used. They go ahead of
    need where possible, and come back before they are used. Results are those of the unlimited program, bit for
    bit, unless a limit is so tight that a library does without the memory that it asks for (cuDNN takes another
    algorithm): a warning says so. PyTorch's optimizers and gradient clipping take what exceeds a limit in pieces,
    in the implementation that was chosen. Called again, it changes the limits of the devices that it names, or adds
    them. A plan is made for the program on one device: the current one, or else the first that was named; the others
    page on demand, and a warning says so. Call it from one thread at a time, while no other is in an op.

    On a PyTorch with the fork's patches all devices page on demand: no plan is made, nothing is recomputed, the
    optimizers are as they are, and a limit is at most nine tenths of the memory that is free.

    Args:
        limit: of each device: bytes, ``"24GiB"``, or ``"50%"`` of the device's memory; or a mapping
            from device to limit. A bare limit is that of the current CUDA device and of those that the
            process uses already, or of the CPU where there is none: where several processes share a machine, call
            ``torch.cuda.set_device`` before. No limit means all of the device's memory.
        min_bytes: smaller storages stay where they are.
        host_limit: of the host memory (for the CPU: the disk space) for paged-out bytes; by default
            80 % of what the machine and its control group allow (90 % of the free disk). Once given, it
            holds until another is.
        spill_dir: the directory for the CPU's spill files; by default that for temporary files.
        expandable_segments: let PyTorch's CUDA allocator grow its segments, so that memory freed in
            small pieces serves large requests. Left as it is if PYTORCH_CUDA_ALLOC_CONF says.
        swap: let plans copy storages to the host. Before there is a plan, and where it errs, storages are
            copied out on demand all the same. Without ``swap`` and ``recompute`` no plan is made.
        recompute: let plans drop storages and run again the ops that made them. Where the host is nearly full, what
            goes out on demand may be dropped, too: so a program gets through its first steps.
        plan: of an earlier run of the same program, or the path of its JSON file: it is carried out from the first
            whole cycle on, and none has to be recorded. One of another program costs time, and is soon replaced.
            A plan of `torch_lms.fit` is refused: it was made of no running program.

    Raises:
        PlanError: for a plan that cannot be read, is for another device, predicts a peak above the limit, is of
            `torch_lms.fit`, or does what ``swap`` and ``recompute`` do not allow; and where these are not bools.
        LimitError: for a size, a device or a directory that cannot be understood or is not there.
        EnvError: if a CUDA graph was captured before automatic mode was on, or the first call of torch_lms comes inside
            of ``allow_mutation_on_saved_tensors``; on the fork, if the program has opened the swap environment.
        LmsError: in a forked child, and for a plan on a PyTorch with the fork's patches.
    """
    global _enabled, _begun, _limits, _options
    if plan is not None:
        need_extension("plans", "leave plan= out: what no op has used for longest goes out")
    limits = parse_limits(limit)
    smallest = parse_bytes(min_bytes)
    all_limits = {**(_limits if _enabled else {}), **limits}
    wishes = planning.Wishes(limits=all_limits, swap=swap, recompute=recompute)
    given = None if plan is None else planning.given_plan(plan, wishes)
    _configure_host(host_limit, spill_dir)
    if any(device.startswith("cuda") for device in limits):
        torch.cuda.init()
        if not _enabled:
            _refuse_graphs()
        if expandable_segments and not sees_every_access:
            _expand_segments()
    _begun = True
    if sees_every_access:
        for device, limit_bytes in limits.items():
            core.enable(device, limit_bytes, smallest)
    else:
        _begin_plans(wishes, given)
        _observe(limits, smallest)
        optimizers.install(all_limits)
    _limits = all_limits
    _options = {"min_bytes": min_bytes, "swap": swap, "recompute": recompute}
    _options["expandable_segments"] = expandable_segments
    _enabled = True


def _begin_plans(wishes: planning.Wishes, given: Plan | None) -> None:
    intercepts.install()
    if wishes.swap or wishes.recompute or given is not None:
        planning.begin(wishes, given)
    else:
        planning.leave()


def _observe(limits: Mapping[str, int], min_bytes: int) -> None:
    for device, limit_bytes in limits.items():
        core.enable(device, limit_bytes, min_bytes)
        if core.memory_report(device)["allocated_bytes"] > limit_bytes:
            discovery.make_known()  # nobody has watched what was made until now


def present_limits() -> dict[str | torch.device, int | str]:
    """Of automatic mode, by device, in bytes; empty where it is off."""
    return {device: nbytes for device, nbytes in _limits.items() if _enabled}


def change_limit(limit: Limit | Mapping[str | torch.device, int | str], **options: Any) -> None:
    """The same as `enable`; where automatic mode is on, what is not named stays as it was asked for.

    Args:
        limit: as for `enable`.
        options: of `enable`.
    """
    enable(limit, **{**(_options if _enabled else {}), **options})


def disable() -> None:
    """Ends automatic mode: ends its plans and limits, pages everything in, and observes no op any more.

    The wrappers around Python's own ways to raw memory (``data_ptr``, ``numpy``) stay, and do next to nothing; a
    ``host_limit`` that was given holds. No effect when automatic mode is off. Call it from one thread at a time.

    Raises:
        torch.OutOfMemoryError: if what is paged out does not fit the device. Storages without room
            stay on the host, where they are right but slow, and come in when they are used.
        LmsError: in a forked child.
    """
    global _enabled, _begun
    if not _begun:
        return
    _enabled = False
    optimizers.uninstall()
    planning.end()
    try:
        core.disable()
    finally:
        _begun = False


def is_enabled() -> bool:
    """Whether automatic mode is on."""
    return _enabled


def count_cpu_allocations() -> None:
    """Counts the bytes that CPU tensors hold from now on, without a limit.

    For measuring: see ``allocated_bytes`` and ``peak_allocated_bytes`` of `torch_lms.stats`.
    """
    core.count_cpu_allocations()


def _configure_host(host_limit: int | str | None, spill_dir: str | os.PathLike[str] | None) -> None:
    host_bytes = 0 if host_limit is None else parse_bytes(host_limit, total_bytes=core.total_bytes("cpu"))
    directory = ""
    if spill_dir is not None:
        directory = str(Path(spill_dir).resolve())
        if not Path(directory).is_dir():
            raise LimitError(f"expected a directory in spill_dir=, found none at {directory!r}; create it first")
    core.configure_host(host_bytes, directory)


def _refuse_graphs() -> None:
    """A graph that was captured before paging was on may use any address."""
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            raise EnvError(
                "expected no CUDA graph or private memory pool before torch_lms.enable, found one; "
                "its addresses are unknown, so call enable() before capturing"
            )


def _expand_segments() -> None:
    configured = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments" not in configured:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
