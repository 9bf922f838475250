"""Automatic mode's plans: a recorded cycle goes to a planner beside the program, and comes back as a plan."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from torch_lms._core import core
from torch_lms.errors import PlanError
from torch_lms.plan.decision import DROP_UNCHANGED, HOST, RECOMPUTE, SWAP
from torch_lms.plan.document import Measured, Plan
from torch_lms.plan.recording import compile_plan, told_of
from torch_lms.plan.trace import Trace
from torch_lms.swap import where
from torch_lms.swap.link import measure_link
from torch_lms.swap.planner_process import PlannerProcess

__all__ = ["Wishes", "begin", "current_plan", "end", "given_plan", "is_planning", "last_trace", "leave", "start"]

_NO_PLAN = "torch_lms: no plan was made for this program, which pages on demand: {}"
_ONE_DEVICE = (
    "torch_lms: the program on {} is planned for, and {} pages on demand; to plan for another device, make it the "
    "current one before enable()"
)
_HOST_SHARE = 0.85  # of the host's room is what plans count on: between blocks of several sizes are gaps
_MOST_PLANS = 32  # the core carries out fewer, and compares a few more


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What plans may do.

    Attributes:
        limits: of each device, in bytes.
        swap: whether storages may be copied out.
        recompute: whether they may be dropped and made again.

    Raises:
        PlanError: for a wish that is neither true nor false.
    """

    limits: Mapping[str, int]
    swap: bool = True
    recompute: bool = True

    def __post_init__(self) -> None:
        for name, wish in (("swap", self.swap), ("recompute", self.recompute)):
            if not isinstance(wish, bool):
                raise PlanError(f"expected True or False as {name}=, found {wish!r}; pass one of them")


class _Kept:
    """A plan that the core may carry out; its document is read when somebody asks for it."""

    def __init__(self, told: Mapping[str, Any], trace: bytes | None) -> None:
        self.document: bytes = told["document"]
        self.signature: str = told["signature"]
        self.device: str = told["device"]
        self.trace = trace  # what it was made of

    @cached_property
    def plan(self) -> Plan:
        return Plan.from_json(self.document.decode())


_wishes: Wishes | None = None
_latest = ""  # the name of a plan; empty for none
_plans: dict[str, _Kept] = {}  # by the core's names: the program may take turns between several
_numbers = itertools.count()  # of plans: several may have one signature
_planner: threading.Thread | None = None
_process: PlannerProcess | None = None
_has_warned = False  # that there is no plan, since automatic mode began
_lock = threading.Lock()


@lru_cache
def bring_back_before_forks() -> None:
    """From now on whoever forks leaves the child all storages: it could not make again what is dropped."""
    os.register_at_fork(before=core.make_dropped_again, after_in_child=_leave_to_parent)
    atexit.register(end)


def _leave_to_parent() -> None:
    """In a forked child: the planner and its process are the parent's, and one of its threads may hold the lock."""
    global _lock, _wishes, _planner, _process
    _lock = threading.Lock()
    _wishes = _planner = _process = None
    _forget()


def given_plan(plan: Plan | str | os.PathLike[str], wishes: Wishes) -> Plan:
    """A plan of an earlier run, or one read from its file, if it can be carried out as is wished for.

    Raises:
        PlanError: for a file that is no plan, or a plan that is not for these devices, limits and ways.
    """
    if not isinstance(plan, (Plan, str, os.PathLike)):
        raise PlanError(f"expected a plan or the path of its file as plan=, found {plan!r}; pass one, or leave it out")
    # A plan that a program has made or changed is checked as a file is.
    found = Plan.from_json(plan.to_json()) if isinstance(plan, Plan) else Plan.load(Path(plan))
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
    """From now on the program on one device is recorded and planned for.

    Args:
        wishes: of the user, with the limits of all devices.
        plan: to carry out from the first cycle that it fits on.
    """
    global _wishes, _has_warned
    with _lock:
        _wishes, _has_warned = wishes, False
        _forget()
    bring_back_before_forks()
    device = _planned_device(wishes) if plan is None else plan.device
    measure_link(device)  # before there is a limit
    core.plan_program(device, wishes.recompute)
    if plan is not None:
        plan = replace(plan, measured=None)  # not measured yet in this run
        with _lock:
            name = _keep(_Kept(told_of(plan), None))
        core.add_plan({**compile_plan(plan), "signature": name, "timed": True})  # it is to stay as it is


def _planned_device(wishes: Wishes) -> str:
    """The current device if it has a limit; warns where others have one, too."""
    devices = list(wishes.limits)
    if torch.cuda.is_initialized() and (current := f"cuda:{torch.cuda.current_device()}") in devices:
        devices.insert(0, devices.pop(devices.index(current)))
    if devices[1:]:
        warnings.warn(_ONE_DEVICE.format(devices[0], ", ".join(devices[1:])), stacklevel=4)
    return devices[0]


def leave() -> None:
    """Automatic mode goes on without plans."""
    end()
    core.plan_no_program()


def end() -> None:
    """No plan is made any more; what is being made is thrown away."""
    global _wishes, _planner
    with _lock:
        _wishes = None
        _forget()
        planner, _planner = _planner, None
        if _process is not None:
            _process.kill()
    if planner is not None and planner.ident is not None:  # it has begun
        planner.join()


def current_plan() -> Plan | None:
    """The plan that automatic mode carries out; None while it has none, or if paging on demand has been faster.

    It says for each storage what is done with it and why, and predicts the step's time and peak; once it has been
    carried out for some steps, ``measured`` says what they took. Where several take turns, it is the last one's.
    ``print`` shows it as a table, ``to_json`` and ``save`` keep it for ``python -m torch_lms explain``.
    """
    with _lock:
        latest, plans = _plans.get(_latest), dict(_plans)
    if latest is None or core.pages_on_demand():
        return None
    name, step_us, peak_bytes, _ = core.measured_plan()
    if name not in plans or not step_us:
        return latest.plan
    return replace(plans[name].plan, measured=Measured(step_us=step_us, peak_bytes=peak_bytes))


def is_planning() -> bool:
    """Whether a plan is being made."""
    with _lock:
        return _planner is not None and _planner.is_alive()


def last_trace() -> Trace | None:
    """What the present plan was made of."""
    with _lock:
        latest = _plans.get(_latest)
    return None if latest is None or latest.trace is None else Trace.from_json(latest.trace.decode())


def start() -> None:
    """The core has recorded a cycle, or timed one that follows a plan: plans it on a thread of its own."""
    global _planner
    recording = core.take_recording()
    name, times = core.take_times()
    where.forget()
    with _lock:
        wishes, followed = _wishes, _plans.get(name)
    if wishes is None:
        return
    if recording is not None:
        name = ""
        device = recording["device"]
        request: dict[str, Any] = {"recording": recording, "link": asdict(measure_link(device))}
    elif followed is not None and followed.trace is not None:
        # A processor's ops are over when they return: their time is the host's.
        host = None if followed.device.startswith("cpu") else times
        request = {"trace": followed.trace, "times_us": times["times_us"], "host": host, "followed": followed.document}
        request |= _measured(name)
        device = followed.device
    else:
        return
    request["limit_bytes"] = wishes.limits[device]
    request["host_limit_bytes"] = int(_HOST_SHARE * core.memory_report(device)["host_limit_bytes"])
    request |= {"swap": wishes.swap, "recompute": wishes.recompute}
    planner = threading.Thread(target=_plan_beside, args=(request, wishes, name), daemon=True, name="torch_lms planner")
    with _lock:
        _planner = planner
        if _process is not None:  # of an earlier recording
            _process.kill()
    try:
        planner.start()
    except RuntimeError as error:  # the system has no more threads
        if not name:
            _note_no_plan(error)


def _measured(name: str) -> dict[str, float]:
    """What the steps of a plan have taken, and waited for memory; nothing if that is not known."""
    measured, step_us, _, wait_us = core.measured_plan()
    return {"step_us": step_us, "wait_us": wait_us} if measured == name else {}


def _keep(kept: _Kept) -> str:
    """Under the lock: keeps a plan for as long as the core may carry it out. Returns its name, which no other has."""
    global _latest
    _latest = f"{kept.signature}#{next(_numbers)}"
    _plans[_latest] = kept
    for old in list(_plans)[:-_MOST_PLANS]:
        del _plans[old]
    return _latest


def _forget() -> None:
    """Under the lock."""
    global _latest
    _latest = ""
    _plans.clear()


def _plan_beside(request: dict[str, Any], wishes: Wishes, followed: str) -> None:
    """Plans, on a thread of its own, which hardly runs Python: see Note [What the program does for a plan].

    Args:
        request: of the planner process.
        wishes: of the user.
        followed: the name of the plan that has been followed while the cycle was timed; empty for a recording.
    """
    timed = followed != ""
    names = [followed] if timed else []  # of the plans that answers speak of
    trace = b""
    try:
        for answer in _answers(request, wishes):
            trace = answer.get("trace", trace)
            with _lock:
                if not _is_wanted(wishes):
                    return
                if (more := answer.get("document")) is not None and (name := names[answer["of"]]) in _plans:
                    _plans[name] = _Kept(more, _plans[name].trace)
                if (told := answer.get("plan")) is None:
                    continue
                name = _keep(_Kept(told, trace))
            core.add_plan({**answer["compiled"], "signature": name, "timed": timed})
            names.append(name)
    except Exception as error:  # on a thread of ours: the program goes on with paging on demand, or with what was made
        with _lock:
            if names or not _is_wanted(wishes):
                return
        _note_no_plan(error)


def _answers(request: Mapping[str, Any], wishes: Wishes) -> Iterator[dict[str, Any]]:
    """By a process that `end`, and the next recording, kill."""
    global _process
    with _lock:
        if not _is_wanted(wishes):
            return
        process = _process = PlannerProcess()
    try:
        yield from process.answers(request)
    finally:
        with _lock:
            _process = None if _process is process else _process


def _note_no_plan(error: Exception) -> None:
    """The core records again after a while; the program is told of the first time."""
    global _has_warned
    core.no_plan()
    with _lock:
        has_warned, _has_warned = _has_warned, True
    if not has_warned:
        warnings.warn(_NO_PLAN.format(error), stacklevel=1)


def _is_wanted(wishes: Wishes) -> bool:
    """Under the lock: whether the calling planner's plans are still asked for."""
    return _wishes is wishes and _planner is threading.current_thread()
