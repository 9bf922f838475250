"""One training run, in a process of its own so that its peaks are its own."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

import torch_lms
from torch_lms.cli.timeline import MemorySampler, Timeline
from torch_lms.cli.workload import Workload
from torch_lms.errors import LimitError, LmsError
from torch_lms.memory_sizes import GIB, parse_bytes

__all__ = ["Paging", "RunFailedError", "RunResult", "StepDone", "run_in_fresh_process"]


class RunFailedError(LmsError):
    """A run ended without a result; the message has its error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Paging:
    """How `torch_lms.enable` is called for a run; None is its own default.

    Raises:
        LimitError: for a size that cannot be understood, or a directory that is not there.
    """

    limit_bytes: int
    min_bytes: int | str | None = None
    host_limit: str | None = None
    spill_dir: str | None = None

    def __post_init__(self) -> None:
        for size, total_bytes in ((self.min_bytes, None), (self.host_limit, GIB)):
            if size is not None:
                parse_bytes(size, total_bytes=total_bytes)
        if self.spill_dir is not None and not Path(self.spill_dir).is_dir():
            raise LimitError(f"expected a directory in --spill-dir, found none at {self.spill_dir!r}; create it first")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """A step has ended.

    Attributes:
        step: its number, from 1.
        loss: at its beginning.
        seconds: that it took.
        planned: whether a plan was there when it began.
        pageout_bytes: that left the device by a copy.
        recomputed_bytes: that were made again.
    """

    step: int
    loss: float
    seconds: float
    planned: bool = False
    pageout_bytes: int = 0
    recomputed_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What a run has done and taken.

    Attributes:
        steps: every step.
        digests: for each parameter, a SHA-256 of all its gradients and of its final value.
        peak_tensor_bytes: the most that tensors held on the device at any moment.
        peak_anonymous_bytes: the most anonymous memory that a sample found.
        timeline: memory over time.
        stats: `torch_lms.stats` at the end.
        plan: JSON of the plan that was carried out at the end; empty without one.
    """

    steps: list[StepDone]
    digests: dict[str, str]
    peak_tensor_bytes: int
    peak_anonymous_bytes: int
    timeline: Timeline
    stats: dict[str, int]
    plan: str = ""

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [step.loss for step in self.steps]


def run_in_fresh_process(workload: Workload, paging: Paging | None, on_step: Callable[[StepDone], None]) -> RunResult:
    """Trains in a new process.

    Args:
        workload: what is trained.
        paging: under which limit; None is the plain run.
        on_step: is called here after each step.

    Raises:
        RunFailedError: if the run failed or its process died.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(workload, paging, there), name="training run")
    process.start()
    there.close()
    try:
        while isinstance(message := here.recv(), StepDone):
            on_step(message)
    except EOFError:
        process.join()
        raise RunFailedError(
            f"expected the result of a training run, found that its process ended with status {process.exitcode}; "
            "a status of -9 is the kernel's, for want of memory: use a smaller --batch"
        ) from None
    except BaseException:
        process.terminate()
        raise
    finally:
        here.close()
        process.join()
    if isinstance(message, RunResult):
        return message
    raise RunFailedError(f"expected the result of a training run, found this error in it:\n{message}")


def _child(workload: Workload, paging: Paging | None, there: Connection) -> None:
    """Sends each `StepDone`, then the `RunResult` or the text of an error."""
    try:
        there.send(_train(workload, paging, there.send))
    except (RuntimeError, ValueError, OSError) as error:  # they say what to do
        there.send("".join(traceback.format_exception_only(error)))
    except Exception:
        there.send(traceback.format_exc())


def _train(workload: Workload, paging: Paging | None, on_step: Callable[[StepDone], None]) -> RunResult:
    device = torch.device(workload.device)
    _make_deterministic(workload.seed)
    _begin_counting(device, paging)
    with MemorySampler(device) as sampler:
        model = workload.build_model()
        steps, digests = _train_steps(workload, model, on_step)
    stats, plan = torch_lms.stats(), torch_lms.current_plan()
    peak_tensor_bytes = stats.peak_allocated_bytes
    if device.type == "cuda":
        peak_tensor_bytes = torch.cuda.max_memory_allocated(device)
    return RunResult(
        steps=steps,
        digests=digests,
        peak_tensor_bytes=peak_tensor_bytes,
        peak_anonymous_bytes=max(sample.anonymous_bytes for sample in sampler.timeline.samples),
        timeline=sampler.timeline.thinned(),
        stats=asdict(stats),
        plan="" if plan is None else plan.to_json(),
    )


def _make_deterministic(seed: int) -> None:
    """Same bits in each run: fixed seeds, and kernels that add in a fixed order where there are such."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds in any order
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(seed)


def _begin_counting(device: torch.device, paging: Paging | None) -> None:
    """From here on tensor bytes are counted, and with `paging` kept within its limit."""
    if paging is None:
        if device.type == "cpu":
            torch_lms.swap.count_cpu_allocations()
        return
    given = {name: value for name, value in asdict(paging).items() if name != "limit_bytes" and value is not None}
    torch_lms.enable({str(device): paging.limit_bytes}, **given)


def _train_steps(
    workload: Workload, model: nn.Module, on_step: Callable[[StepDone], None]
) -> tuple[list[StepDone], dict[str, str]]:
    """Trains; returns the steps and each parameter's digest. Digests and data are outside of the measured time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate)
    draw = workload.build_batches()
    hashes = {name: hashlib.sha256() for name, _ in model.named_parameters()}
    steps = []
    for step in range(1, workload.steps + 1):
        inputs, targets = (tensor.to(workload.device) for tensor in draw())
        before, planned = torch_lms.stats(), torch_lms.current_plan() is not None
        began = time.perf_counter()
        loss: torch.Tensor = model(inputs, targets)
        loss.backward()
        optimizer.step()
        value = float(loss.item())
        if inputs.is_cuda:
            torch.cuda.synchronize(inputs.device)
        seconds, after = time.perf_counter() - began, torch_lms.stats()
        steps.append(
            StepDone(
                step=step,
                loss=value,
                seconds=seconds,
                planned=planned,
                pageout_bytes=after.pageout_bytes - before.pageout_bytes,
                recomputed_bytes=after.recomputed_bytes - before.recomputed_bytes,
            )
        )
        for name, parameter in model.named_parameters():
            hashes[name].update(_bits(parameter.grad))
        optimizer.zero_grad(set_to_none=True)
        on_step(steps[-1])
    for name, parameter in model.named_parameters():
        hashes[name].update(_bits(parameter))
    return steps, {name: digest.hexdigest() for name, digest in hashes.items()}


def _bits(tensor: torch.Tensor | None) -> bytes:
    """A tensor's bytes. They are read from a copy: a storage that numpy has seen would never move again."""
    if tensor is None:
        return b"none"
    copy = tensor.detach().to("cpu", copy=True).contiguous().flatten()
    return copy.view(torch.uint8).numpy().tobytes()
