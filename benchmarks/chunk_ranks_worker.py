"""What one rank does for a row of `benchmarks.chunk_ranks`, in a process of its own."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_lms
from benchmarks.chunked import FullySharded, in_chunks
from benchmarks.peers import checkpoint_blocks
from benchmarks.training import digest, make_deterministic
from benchmarks.workloads import Program, make_program, sizes_of
from torch_lms._torch_compat import all_gather_single, reduce_scatter_single
from torch_lms.chunk import ChunkedOptimizer
from torch_lms.chunk.model_data import ModelData
from torch_lms.chunk.reduction import Reductions

__all__ = ["COMPARED_STEPS", "RankJob", "collectives", "measure", "training"]

Row = dict[str, Any]

COMPARED_STEPS = 3
"""That are not timed, and whose results are compared."""

_SETTLING_STEPS = 1  # after what was compared has been read
_WARMUP_TURNS = 3
_TURNS = 11


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """One rank's share of a row.

    Attributes:
        work: makes the row.
        way: how it trains, for `training`: a key of `OPTIMIZERS`.
        device: ``"cuda"`` or ``"cpu"``.
        tiny: whether the model is small.
        rank: of this process.
        world: how many ranks there are.
        meeting: a file that is not there yet, through which they meet.
        batches: that this rank trains on in each step, of all ranks' ones.
        compares: whether results are read after the first steps.
        steps: that are timed.
        timeout_s: that a collective may take.
    """

    work: Callable[[RankJob], Row]
    way: str = "chunks"
    device: str
    tiny: bool
    rank: int
    world: int
    meeting: str
    batches: Sequence[int]
    compares: bool
    steps: int
    timeout_s: float = 60


OPTIMIZERS: dict[str, Callable[[Program, DeviceMesh], Any]] = {
    "chunks": lambda program, mesh: in_chunks(program, update_on="device", mesh=mesh),
    "fsdp": lambda program, mesh: FullySharded(program, mesh, offload=False),
}


def measure(job: RankJob, _: Callable[[Row], None]) -> Row:
    """Joins the ranks and does its work; what was measured, by the name of its column."""
    make_deterministic()
    if job.device == "cuda":
        torch.cuda.set_device(job.rank)
    else:
        torch.set_num_threads(1)
        torch_lms.swap.count_cpu_allocations()
    dist.init_process_group(
        "nccl" if job.device == "cuda" else "gloo",
        init_method=f"file://{job.meeting}",
        rank=job.rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout_s),
    )
    row = job.work(job)
    dist.destroy_process_group()
    return row


def _program(job: RankJob) -> Program:
    program = make_program("gpt", job.device, tiny=job.tiny)
    checkpoint_blocks(program)
    return program


# --- steps ----------------------------------------------------------------------------------------------------


def training(job: RankJob) -> Row:
    """Steps of the model on this rank's batches."""
    program = _program(job)
    parameters = sum(one.numel() for one in program.model.parameters())
    optimizer = OPTIMIZERS[job.way](program, init_device_mesh(job.device, (job.world,)))
    batches = [_batch(job, number) for number in job.batches]
    losses: list[list[float]] = []

    def step() -> float:
        start = time.perf_counter()
        losses.append(_step(program, optimizer, batches))
        _synchronize(job.device)
        return 1e3 * (time.perf_counter() - start)

    for _ in range(COMPARED_STEPS):
        step()
    row = _results(program, job) if job.compares else {}
    for _ in range(_SETTLING_STEPS):
        step()
    _reset_peak(job.device)
    times_ms = [step() for _ in range(job.steps)]
    return {
        **row,
        **({"step_ms": statistics.median(times_ms), "step_ms_all": times_ms} if times_ms else {}),
        "losses": losses,
        "parameters": parameters,
        "tokens": program.samples * program.tokens * len(batches),
        **_memory(job.device),
    }


def _results(program: Program, job: RankJob) -> Row:
    """A digest of all masters, which all ranks must ask for."""
    masters = program.model.state_dict().values()
    return {"digest": digest(masters)} if job.rank == 0 else {}


def _batch(job: RankJob, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch and its next tokens; the same wherever this is called."""
    sizes = sizes_of("gpt", tiny=job.tiny, changed={})
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(sizes["vocabulary"], (sizes["batch"], sizes["tokens"]), generator=generator).to(job.device)
    return ids, ids.roll(-1, 1)


def _step(program: Program, optimizer: Any, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """One step on the mean of some batches; their losses."""
    program.model.zero_grad(set_to_none=True)
    losses = []
    for ids, next_ids in batches:
        loss = program.model(ids, next_ids)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    optimizer.step()
    return [float(loss) for loss in losses]


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _reset_peak(device: str) -> None:
    if device == "cpu":
        torch_lms.stats(reset=True)
    else:
        torch.cuda.reset_peak_memory_stats()


def _memory(device: str) -> Row:
    """The device's peak, and what this process has of the host now."""
    peak_bytes = torch_lms.stats().peak_allocated_bytes if device == "cpu" else torch.cuda.max_memory_allocated()
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"peak_bytes": peak_bytes, "host_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE")}


# --- collectives ----------------------------------------------------------------------------------------------


def collectives(job: RankJob) -> Row:
    """All of a model's chunks gathered, and reduced, beside calls of their sizes and one large one; in turns."""
    optimizer = in_chunks(_program(job), update_on="device", mesh=init_device_mesh(job.device, (job.world,)))
    assert isinstance(optimizer, ChunkedOptimizer)
    data = optimizer.data
    chunks = [chunk for chunk, is_cut in enumerate(data.is_cut) if is_cut]
    reductions = Reductions(data, lambda chunk: torch.empty_like(data.parameters.chunk(chunk)))
    whole = torch.zeros(len(chunks) * data.layout.chunk_numel, dtype=data.dtype, device=data.device)
    part = whole.new_zeros(whole.numel() // job.world)
    wholes, parts = whole.chunk(len(chunks)), part.chunk(len(chunks))
    ways: dict[str, Callable[[], object]] = {
        "gather": lambda: _gather(data, chunks),
        "gather_calls": lambda: _calls(all_gather_single, zip(wholes, parts, strict=True)),
        "gather_plain": lambda: all_gather_single(whole, part),
        "reduce": lambda: _reduce(reductions, chunks),
        "reduce_calls": lambda: _calls(reduce_scatter_single, zip(parts, wholes, strict=True)),
        "reduce_plain": lambda: reduce_scatter_single(part, whole),
    }
    times_ms: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_WARMUP_TURNS + _TURNS):
        for name, way in ways.items():
            if name == "reduce":
                _give_gradients(reductions, data, chunks)
            times_ms[name].append(_timed_ms(job, way))
    row: Row = {"chunks": len(chunks), "chunk_bytes": data.layout.chunk_numel * data.dtype.itemsize}
    sent_gb = whole.nbytes * (job.world - 1) / job.world / 1e9  # what each rank sends, and gets
    for name, found in times_ms.items():
        timed_ms = found[_WARMUP_TURNS:]
        row |= {f"{name}_ms_all": timed_ms, f"{name}_gbps": 1e3 * sent_gb / statistics.median(timed_ms)}
    return {**row, **_memory(job.device)}


def _timed_ms(job: RankJob, work: Callable[[], object]) -> float:
    """From when all ranks are ready until it is done here."""
    dist.barrier()
    _synchronize(job.device)
    start = time.perf_counter()
    work()
    _synchronize(job.device)
    return 1e3 * (time.perf_counter() - start)


def _calls(collective: Callable[..., Any], tensors: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """One behind the other, without anything else."""
    for work in [collective(to, of, async_op=True) for to, of in tensors]:
        work.wait()


def _gather(data: ModelData, chunks: Sequence[int]) -> None:
    """As for a forward: each begins to come while the one before it is used."""
    for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
        for begun in (chunk, following):
            if begun is not None:
                data.gathered.begin(begun, data.parameters.chunk(begun))
        data.gathered.finish(chunk)
        data.gathered.release((chunk,))


def _give_gradients(reductions: Reductions, data: ModelData, chunks: Sequence[int]) -> None:
    """Zeros, as from a backward."""
    zero = torch.zeros((), dtype=data.dtype, device=data.device)
    for number in chain.from_iterable(data.in_chunk[chunk] for chunk in chunks):
        reductions.arrived(number, zero.expand(data.views[number].shape))


def _reduce(reductions: Reductions, chunks: Sequence[int]) -> None:
    """As after a backward that has given all gradients."""
    for chunk in reversed(chunks):
        reductions.complete(chunk)
    reductions.forget()
    reductions.abandon_backward()
