"""One row about plans: some steps of one program in one way, in a process of its own, timed and counted."""

from __future__ import annotations

import gzip
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import torch_lms
from benchmarks.training import GIB, digest, forget_workspace_setting, make_deterministic
from benchmarks.workloads import Program, make_program
from torch_lms._core import core
from torch_lms.plan import Plan
from torch_lms.swap.planning import is_planning, last_trace

__all__ = ["Paging", "Run", "measure"]

MS = 1e3
COUNTED_EACH_STEP = ("pageout_bytes", "pagein_bytes", "passive_pageins", "wait_us", "host_served", "allocation_retries")
_MOST_DIGEST_BYTES = 8 * GIB
_TINY_MIN_BYTES = 4096
_STEPS_TO_FALL_ASLEEP = 6  # the first ones may need less memory than others
_SHARE_FOLLOWED = 0.9  # of a cycle's ops
_MOST_S_TO_SETTLE = 60  # the plan is made again with other times
_STEPS_SETTLED = 2  # one that has just come is taken up in the next step
_STEPS_AFTER_REFUSAL = 6  # another cycle may be recorded, and planned


@dataclass(frozen=True, kw_only=True)
class Paging:
    """How `torch_lms.enable` is called.

    Attributes:
        limit_bytes: of the device.
        host_limit: of the host's memory; None for the default.
        swap: let plans copy.
        recompute: let plans make again; without either there is no plan.
        expandable_segments: of PyTorch's allocator.
    """

    limit_bytes: int
    host_limit: str | None = None
    swap: bool = True
    recompute: bool = True
    expandable_segments: bool = True

    @property
    def plans(self) -> bool:
        """Whether there will be a plan."""
        return self.swap or self.recompute


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a row is of.

    Attributes:
        workload: its name.
        device: of the program.
        tiny: whether its sizes are small.
        changed: sizes that are not the workload's.
        change: what a peer does to the program.
        paging: our limit; None without.
        cap_bytes: what PyTorch's allocator may reserve at most, as a limit without paging; None for all.
        optimizer: whether AdamW steps, too; then parameters are compared, not gradients.
        optimize: makes something else that steps.
        steps: that are timed.
        warmup_steps: before them; with a plan they follow it.
        most_steps: to wait for a plan.
        most_seconds: likewise.
        with_digest: whether results are compared bit for bit, which takes seconds.
        digests_after: also after so many steps from the beginning.
        least_steps: in all.
        deterministic: whether the order of additions is fixed.
        facts: further columns, found out at the end; gets the program and its optimizer.
        record: makes the step that it is called with, which is none of those that are timed, and finds further columns
            in it; gets the optimizer, and the beginning of names of files if there are to be any.
        keep: the plan and its trace are written to files that begin so; empty for none.
    """

    workload: str
    device: str = "cuda"
    tiny: bool = False
    changed: Mapping[str, int] = field(default_factory=dict)
    change: Callable[[Program], None] | None = None
    paging: Paging | None = None
    cap_bytes: int | None = None
    optimizer: bool = False
    optimize: Callable[[Program], Any] | None = None
    steps: int = 8
    warmup_steps: int = 3
    most_steps: int = 60
    most_seconds: float = 60.0
    with_digest: bool = True
    digests_after: tuple[int, ...] = ()
    least_steps: int = 0
    deterministic: bool = True
    facts: Callable[[Program, Any], dict[str, Any]] | None = None
    record: Callable[[Any, Callable[[], None], str], dict[str, Any]] | None = None
    keep: str = ""


def _adamw(program: Program) -> torch.optim.Optimizer:
    return torch.optim.AdamW(program.model.parameters(), lr=1e-4)


class _Refusals:
    """Warnings, on whatever thread, that a plan could not be made."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.shown = warnings.showwarning

    def __enter__(self) -> _Refusals:
        """Listens from now on."""

        def show(message: Warning | str, *rest: Any, **words: Any) -> None:
            if "no plan was made" in str(message):
                self.texts.append(str(message))
            self.shown(message, *rest, **words)

        warnings.showwarning = show
        return self

    def __exit__(self, *_: object) -> None:
        warnings.showwarning = self.shown


class _Steps:
    """Steps of a program, each with its time and loss."""

    def __init__(self, run: Run, news: Callable[[dict[str, Any]], None]) -> None:
        self.run = run
        self.news = news
        self.program = make_program(run.workload, run.device, tiny=run.tiny, changed=run.changed)
        if run.change is not None:
            run.change(self.program)
        self.optimizer = (run.optimize or _adamw)(self.program) if run.optimizer else None
        self.deterministic = True
        self.times_ms: list[float] = []
        self.losses: list[float] = []
        self.digests: dict[str, str] = {}
        self.paged: list[dict[str, float]] = []
        self._counted = torch_lms.stats()

    def one(self) -> None:
        """A step, with its time; the first finds out whether each op can run with its order of additions fixed."""
        start = time.perf_counter()
        try:
            loss = self._step()
        except RuntimeError as error:
            if "deterministic" not in str(error) or self.losses:
                raise
            self.deterministic = False
            make_deterministic(warn_only=True)
            loss = self._step()
        self.losses.append(float(loss.item()))
        forget_workspace_setting()
        _synchronize(self.run.device)
        self.times_ms.append(MS * (time.perf_counter() - start))
        self.paged.append(self._since_last_step())
        self.news({"step_ms_so_far": self.times_ms})
        if len(self.losses) in self.run.digests_after:
            self.digests[str(len(self.losses))] = self.results()

    def _since_last_step(self) -> dict[str, float]:
        """What paging has counted since it was asked last; of the counters that are kept for every step."""
        before, now = self._counted, torch_lms.stats()
        self._counted = now
        found = {name: getattr(now, name) - getattr(before, name) for name in COUNTED_EACH_STEP}
        return found if all(value >= 0 for value in found.values()) else {}  # they have begun anew

    def _step(self) -> torch.Tensor:
        """Forward, backward and the optimizer's step if there is one; the same random numbers each time."""
        torch.manual_seed(1)
        self.program.model.zero_grad(set_to_none=True)
        with self.program.scope():
            loss = self.program.loss()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.detach()

    def one_profiled(self, path: str) -> None:
        """A step's kernels and copies, as a Chrome trace."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profiler:
            self.one()
        profiler.export_chrome_trace(path)
        Path(f"{path}.gz").write_bytes(gzip.compress(Path(path).read_bytes()))
        Path(path).unlink()

    def several(self, count: int) -> list[float]:
        """Their times in milliseconds."""
        for _ in range(count):
            self.one()
        return self.times_ms[len(self.times_ms) - count :]

    def until_followed(self) -> dict[str, Any]:
        """Steps until a plan is followed, with the times of a step that follows one, or patience has ended."""
        start = time.perf_counter()
        most_steps = self.run.most_steps * (100 if self.run.tiny else 1)  # a planner takes as long for a tiny program
        row: dict[str, Any] = {"planned_after_steps": None, "followed_after_steps": None, "signatures": []}
        row["planning_all"] = []  # for each step, whether the planner was at work after it
        followed_at_s = 0.0
        settled = 0  # steps
        with _Refusals() as refusals:
            while (
                settled < _STEPS_SETTLED
                and not core.pages_on_demand()
                and (not followed_at_s or time.perf_counter() - followed_at_s < _MOST_S_TO_SETTLE)
                and (core.attention() != "asleep" or len(self.times_ms) < _STEPS_TO_FALL_ASLEEP)  # else it fits
                and len(self.times_ms) < most_steps
                and time.perf_counter() - start < self.run.most_seconds
            ):
                self.one()
                row["planning_all"].append(is_planning())
                settled = settled + 1 if core.follows_timed_plan() and not row["planning_all"][-1] else 0
                plan = torch_lms.current_plan()
                if plan is not None and plan.signature not in row["signatures"]:
                    row["signatures"].append(plan.signature)
                    row["planned_after_steps"] = row["planned_after_steps"] or len(self.times_ms)
                if plan is not None and core.share_in_step() > _SHARE_FOLLOWED and row["followed_after_steps"] is None:
                    row["followed_after_steps"] = len(self.times_ms)
                    followed_at_s = time.perf_counter()
                if refusals.texts:
                    most_steps = min(most_steps, len(self.times_ms) + _STEPS_AFTER_REFUSAL)
        return {
            **row,
            "planned": row["planned_after_steps"] is not None,
            "pages_on_demand": core.pages_on_demand(),
            "followed": row["followed_after_steps"] is not None,
            "learning_ms_all": list(self.times_ms),
            "settled_after_steps": len(self.times_ms) if core.follows_timed_plan() else None,
            "learning_s": time.perf_counter() - start,
            "refusals": refusals.texts,
        }

    def results(self) -> str:
        """A digest of gradients or parameters, of a part of them if they are many."""
        parameters = list(self.program.model.parameters())
        tensors = [one if self.run.optimizer else one.grad for one in parameters]
        total_bytes = sum(one.nbytes for one in parameters)
        return digest(tensors[:: 1 + total_bytes // _MOST_DIGEST_BYTES])


def measure(run: Run, news: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Runs it; what was measured, by the name of its column.

    Args:
        run: what to do.
        news: is told the times so far.
    """
    _begin(run)
    steps = _Steps(run, news)
    row: dict[str, Any] = {"samples": steps.program.samples, "tokens": steps.program.tokens}
    if run.paging is not None and run.paging.plans:
        row |= steps.until_followed()
    row["warmup_ms_all"] = steps.several(run.warmup_steps)
    if run.with_digest and run.paging is None and run.change is None:
        row["digest_before"] = steps.results()
    before_bytes = _peak_bytes(run.device)
    _reset(run.device)
    times_ms = steps.several(run.steps)
    row |= {"step_ms": statistics.median(times_ms), "step_ms_all": times_ms}
    row |= {"samples_per_s": steps.program.samples * MS / row["step_ms"]}
    row |= {**_counted(run), **_planned(run)}
    row["most_gib"] = max(before_bytes / GIB, row["peak_gib"])
    row["deterministic"] = run.deterministic and steps.deterministic
    if run.keep and run.device != "cpu":
        steps.one_profiled(f"{run.keep}.profile.json")
    if run.keep and run.paging is not None:
        row["paged_all"] = list(steps.paged)
    if run.facts is not None:
        row |= run.facts(steps.program, steps.optimizer)
    digest_at_end = steps.results() if run.with_digest else ""
    steps.digests |= {str(len(steps.losses)): digest_at_end} if run.with_digest else {}
    if run.record is not None:
        row |= run.record(steps.optimizer, steps.one, run.keep)
    steps.several(max(0, run.least_steps - len(steps.losses)))
    return {**row, "losses": steps.losses, "digests": steps.digests, "digest": digest_at_end}


def _begin(run: Run) -> None:
    """Settings and limits, before anything is on the device."""
    if run.deterministic:
        make_deterministic(warn_only=False)
    if run.tiny:
        torch.set_num_threads(1)  # small ops on several threads wait for each other
    if run.device == "cpu":
        torch_lms.swap.count_cpu_allocations()
    elif run.cap_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(run.cap_bytes / torch.cuda.mem_get_info()[1])
    if run.paging is not None:
        torch_lms.enable(
            {run.device: run.paging.limit_bytes},
            min_bytes=_TINY_MIN_BYTES if run.tiny else 1 << 20,
            host_limit=run.paging.host_limit,
            expandable_segments=run.paging.expandable_segments,
            swap=run.paging.swap,
            recompute=run.paging.recompute,
        )
        _reset(run.device)  # what measuring the link took was before there was a limit


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _reset(device: str) -> None:
    """Peaks and counters begin anew."""
    torch_lms.stats(reset=True)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()


def _peak_bytes(device: str) -> int:
    return torch_lms.stats().peak_allocated_bytes if device == "cpu" else torch.cuda.max_memory_allocated()


def _counted(run: Run) -> dict[str, Any]:
    """Memory, and what paging has done in each timed step."""
    counted = torch_lms.stats()
    peak_bytes = _peak_bytes(run.device)
    reserved_bytes = peak_bytes if run.device == "cpu" else torch.cuda.max_memory_reserved()
    return {
        "peak_gib": peak_bytes / GIB,
        "peak_bytes": peak_bytes,
        "reserved_gib": reserved_bytes / GIB,
        "out_gib": counted.pageout_bytes / run.steps / GIB,
        "in_gib": counted.pagein_bytes / run.steps / GIB,
        "unchanged_gib": counted.dropped_bytes / run.steps / GIB,
        "recomputed_gib": counted.recomputed_bytes / run.steps / GIB,
        "recomputations": counted.recomputations / run.steps,
        "faults": counted.passive_pageins / run.steps,
        "prefetched": counted.prefetch_hits / run.steps,
        "cancelled": counted.cancelled_pageouts / run.steps,
        "host_served": counted.host_served / run.steps,
        "retries": counted.allocation_retries / run.steps,
        "limit_exceeded": counted.limit_exceeded,
        "pagein_failures": counted.pagein_failures,
        "wait_ms": counted.wait_us / 1e3 / run.steps,
        "host_gib": counted.host_bytes / GIB,
    }


def _planned(run: Run) -> dict[str, Any]:
    """What the plan predicts and decides; nothing where there is none."""
    plan = torch_lms.current_plan()
    if run.paging is None or plan is None:
        return {}
    if run.keep:
        _keep(run.keep, plan)
    known = plan.predicted
    bytes_by_kind: Counter[str] = Counter()
    for one in plan.decisions:
        bytes_by_kind[one.decision] += one.bytes
    return {
        "method": plan.method,
        "methods": [asdict(one) for one in plan.methods],
        "predicted_ms": known.step_us / MS,
        "predicted_plain_ms": known.plain_us / MS,
        "bound_ms": known.lower_bound_us / MS,
        "predicted_peak_gib": known.peak_bytes / GIB,
        "predicted_plain_peak_gib": known.plain_peak_bytes / GIB,
        "predicted_out_gib": known.out_bytes / GIB,
        "predicted_in_gib": known.in_bytes / GIB,
        "predicted_recompute_ms": known.recompute_us / MS,
        "predicted_waits_ms": known.waits_us / MS,
        "decided": dict(Counter(one.decision for one in plan.decisions)),
        "decided_gib": {kind: size / GIB for kind, size in bytes_by_kind.items()},
        "plan_ops": len(plan.ops),
        "plan_limit_gib": plan.limit_bytes / GIB,
        "share_in_step": core.share_in_step(),
    }


def _keep(prefix: str, plan: Plan) -> None:
    """The plan, and what it was made of, for looking at them later."""
    texts = {"plan": plan.to_json()}
    if (trace := last_trace()) is not None:
        texts["trace"] = trace.to_json()
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        Path(f"{prefix}.{name}.json.gz").write_bytes(gzip.compress(text.encode()))
