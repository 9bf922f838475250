"""Automatic mode's plans: a recorded cycle goes to a planner beside the program, and comes back as a plan."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch_lms._core import core
from torch_lms.errors import PlanError
from torch_lms.plan.decision import DROP_UNCHANGED, HOST, RECOMPUTE, SWAP
from torch_lms.plan.document import Measured, Plan
from torch_lms.plan.predict import priced_again
from torch_lms.plan.trace import Trace
from torch_lms.swap import where
from torch_lms.swap.link import measure_link
from torch_lms.swap.planner_process import PlannerProcess
from torch_lms.swap.recording import compile_plan, timed_again, trace_of

__all__ = ["Wishes", "begin", "current_plan", "end", "given_plan", "last_trace", "start"]

_MARGIN_SHARE = 32  # of the limit, which the allocator's rounding and small differences take
_MARGIN_BYTES = 1 << 30
_MOST_MARGIN_SHARE = 8
_MUCH_SLOWER = 1.1  # than predicted
_MOST_PLANS = 32  # the core carries out fewer, and compares a few more


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What plans may do.

    Attributes:
        limits: of each device, in bytes.
        host_limit_bytes: of the host's memory; None for the core's own limit.
        swap: whether storages may be copied out.
        recompute: whether they may be dropped and made again.
    """

    limits: Mapping[str, int]
    host_limit_bytes: int | None = None
    swap: bool = True
    recompute: bool = True


_wishes: Wishes | None = None
_plan: Plan | None = None
_plans: dict[str, Plan] = {}  # by the core's names: the program may take turns between several
_traces: dict[str, Trace] = {}  # what these were made of
_numbers = itertools.count()  # of plans: several may have one signature
_trace: Trace | None = None
_planner: threading.Thread | None = None
_process: PlannerProcess | None = None
_lock = threading.Lock()


@lru_cache
def bring_back_before_forks() -> None:
    """From now on whoever forks leaves the child all storages: it could not make again what is dropped."""
    os.register_at_fork(before=core.make_dropped_again)
    atexit.register(end)


def given_plan(plan: Plan | str | os.PathLike[str], wishes: Wishes) -> Plan:
    """A plan of an earlier run, or one read from its file, if it can be carried out as is wished for.

    Raises:
        PlanError: for a file that is no plan, or a plan that is not for these devices, limits and ways.
    """
    found = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    limit_bytes = wishes.limits.get(found.device)
    if limit_bytes is None:
        raise PlanError(
            f"expected a plan for {' or '.join(wishes.limits)}, found one for {found.device}; "
            "limit that device, or leave plan= out"
        )
    if found.predicted.peak_bytes > limit_bytes:
        raise PlanError(
            f"expected a plan that keeps {found.device} within its limit of {limit_bytes} bytes, found one with a peak "
            f"of {found.predicted.peak_bytes} bytes; raise the limit, or leave plan= out"
        )
    off = (() if wishes.recompute else (RECOMPUTE,)) + (() if wishes.swap else (SWAP, DROP_UNCHANGED, HOST))
    if refused := sorted({one.decision for one in found.decisions}.intersection(off)):
        raise PlanError(
            f"expected a plan that does only what swap= and recompute= allow, found one with {' and '.join(refused)}; "
            "allow it, or leave plan= out"
        )
    if not any(op.key for op in found.ops):
        raise PlanError(
            "expected a plan that was made of a running program, found one that was made before (torch_lms.fit); "
            "save current_plan() once the program runs, or leave plan= out"
        )
    return found


def begin(wishes: Wishes, plan: Plan | None = None) -> None:
    """From now on programs are recorded and planned for.

    Args:
        wishes: of the user.
        plan: to carry out from the first cycle that it fits on.
    """
    global _wishes, _plan, _trace
    with _lock:
        _wishes, _plan, _trace = wishes, None, None
        _plans.clear()
        _traces.clear()
        if plan is not None:
            _plan, name = replace(plan, measured=None), _name_of(plan)  # not measured yet in this run
            _keep(name, _plan, None)
    bring_back_before_forks()
    for device in wishes.limits:
        measure_link(device)  # before there is a limit
        core.plan_program(device)
    if plan is not None:
        core.add_plan(compile_plan(plan, name, timed=True))  # it is to stay as it is


def end() -> None:
    """No plan is made any more; what is being made is thrown away."""
    global _wishes, _plan, _trace, _planner
    with _lock:
        _wishes, _plan, _trace = None, None, None
        _plans.clear()
        _traces.clear()
        planner, _planner = _planner, None
        if _process is not None:
            _process.kill()
    if planner is not None:
        planner.join()


def current_plan() -> Plan | None:
    """The plan that automatic mode carries out; None while it has none, or if paging on demand has been faster.

    It says for each storage what is done with it and why, and predicts the step's time and peak; once it has been
    carried out for some steps, ``measured`` says what they took. Where several take turns, it is the last one's.
    ``print`` shows it as a table, ``to_json`` and ``save`` keep it for ``python -m torch_lms explain``.
    """
    with _lock:
        plan, plans = _plan, dict(_plans)
    if plan is None or core.pages_on_demand():
        return None
    name, step_us, peak_bytes = core.measured_plan()
    plan = plans.get(name, plan)
    if name not in plans or not step_us:
        return plan
    return replace(plan, measured=Measured(step_us=step_us, peak_bytes=peak_bytes))


def last_trace() -> Trace | None:
    """What the present plan was made of."""
    with _lock:
        return _trace


def start() -> None:
    """The core has recorded a cycle, or timed one that follows a plan: plans it on a thread of its own."""
    global _planner
    recording = core.take_recording()
    name, times_us = core.take_times()
    where.forget()
    with _lock:
        wishes, trace = _wishes, _traces.get(name)
        is_crowded = recording is None and _takes_much_longer(name)
    make_trace: Callable[[], Trace]
    if wishes is not None and recording is not None:
        make_trace = partial(_recorded, recording, wishes)
    elif wishes is not None and trace is not None:
        make_trace = partial(timed_again, trace, times_us)
    else:
        return
    planner = threading.Thread(
        target=_plan_beside,
        args=(make_trace, wishes),
        kwargs={"followed": name if recording is None else "", "is_crowded": is_crowded},
        daemon=True,
        name="torch_lms planner",
    )
    with _lock:
        _planner = planner
        if _process is not None:  # of an earlier recording
            _process.kill()
    planner.start()


def _takes_much_longer(name: str) -> bool:
    """Under the lock: whether the steps of a plan have taken much longer than it says.

    Then most of the time goes into looking for memory in one piece, and what has been planned does not hold any more.
    """
    measured, step_us, _ = core.measured_plan()
    plan = _plans.get(name)
    return plan is not None and measured == name and step_us > plan.predicted.step_us * _MUCH_SLOWER


def _name_of(plan: Plan) -> str:
    """A name for the core, which no other plan has."""
    return f"{plan.signature}#{next(_numbers)}"


def _keep(name: str, plan: Plan, trace: Trace | None) -> None:
    """Under the lock: keeps a plan, and what it was made of, for as long as the core may carry it out."""
    _plans[name] = plan
    if trace is not None:
        _traces[name] = trace
    for old in list(_plans)[:-_MOST_PLANS]:
        del _plans[old]
        _traces.pop(old, None)


def _recorded(recording: Mapping[str, Any], wishes: Wishes) -> Trace:
    device = recording["device"]
    return trace_of(recording, limit_bytes=wishes.limits[device], link=measure_link(device))


def _plan_beside(make_trace: Callable[[], Trace], wishes: Wishes, *, followed: str, is_crowded: bool) -> None:
    """Plans, on a thread of its own.

    Args:
        make_trace: of the cycle.
        wishes: of the user.
        followed: the name of the plan that has been followed while the cycle was timed; empty for a recording.
        is_crowded: see `_margins`.
    """
    global _plan, _trace
    made = timed = followed != ""
    try:
        trace = make_trace()
        if timed:
            _price_again(followed, trace)
        for plan in _plans_of(trace, wishes.limits[trace.device], wishes, is_crowded=is_crowded):
            name = _name_of(plan)
            compiled = compile_plan(plan, name, timed=timed)
            with _lock:
                if not _is_wanted(wishes):
                    return
                _plan, _trace = plan, trace
                _keep(name, plan, trace)
            core.add_plan(compiled)
            made = True
    except Exception as error:  # on a thread of ours: the program goes on with paging on demand, or with what was made
        with _lock:
            if made or not _is_wanted(wishes):
                return
        warnings.warn(f"torch_lms: no plan was made for this program, which pages on demand: {error}", stacklevel=1)


def _price_again(name: str, trace: Trace) -> None:
    """A plan may stay that was made of the recording's times: what it predicts is for those of its own steps then."""
    global _plan
    with _lock:
        plan = _plans.get(name)
    if plan is None:
        return
    again = priced_again(plan, trace)
    with _lock:
        if _plans.get(name) is plan:
            _plans[name] = again
        if _plan is plan:
            _plan = again


def _margins(trace: Trace, limit_bytes: int, *, is_crowded: bool) -> dict[str, int]:
    """How far below the limit a plan stays: on CUDA, free memory lies in pieces, and is to hold the largest storage.

    Where that has turned out to be too little, it is as much as may be.
    """
    margin_bytes = min(limit_bytes // _MARGIN_SHARE, _MARGIN_BYTES)
    largest_bytes = max((storage.bytes for storage in trace.storages), default=0)
    most_bytes = limit_bytes // _MOST_MARGIN_SHARE - margin_bytes
    wanted_bytes = most_bytes if is_crowded else min(largest_bytes, most_bytes)
    pieces_bytes = wanted_bytes if trace.device.startswith("cuda") else 0
    return {"margin_bytes": margin_bytes, "pieces_bytes": pieces_bytes}


def _plans_of(trace: Trace, limit_bytes: int, wishes: Wishes, *, is_crowded: bool) -> Iterator[Plan]:
    """By a process that `end`, and the next recording, kill."""
    global _process
    request = {
        "trace": json.loads(trace.to_json()),
        "limit_bytes": limit_bytes,
        **_margins(trace, limit_bytes, is_crowded=is_crowded),
        "host_limit_bytes": wishes.host_limit_bytes,
        "swap": wishes.swap,
        "recompute": wishes.recompute,
    }
    with _lock:
        if not _is_wanted(wishes):
            return
        process = _process = PlannerProcess()
    try:
        yield from process.plans(request)
    finally:
        with _lock:
            _process = None if _process is process else _process


def _is_wanted(wishes: Wishes) -> bool:
    """Under the lock: whether the calling planner's plans are still asked for."""
    return _wishes is wishes and _planner is threading.current_thread()
