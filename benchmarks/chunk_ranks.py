"""Chunks on several GPUs: steps beside one GPU's and FSDP2's, collectives beside NCCL's own rate.

    torchrun --nproc-per-node 2 -m benchmarks.chunk_ranks --output-dir benchmarks/results
    torchrun --nproc-per-node 2 -m benchmarks.chunk_ranks --tiny --device cpu --output-dir /tmp/out

Each GPU trains on batches of its own, always as large, in 16 bits with 32-bit masters and fused AdamW, its blocks
checkpointed. Times are the first rank's. Memory is that of the rank that has most: of the device its peak in steps that
are timed, of the host what the process has after them. Model TFLOP/s are those of one GPU, six operations for each
parameter and token: what is computed again is not counted. Rates of collectives are of the bytes that each GPU sends.

Losses and masters of two ranks are, bit for bit, those of one process that accumulates both batches. More ranks add
gradients in another order: how far their losses are off is told.

Every rank makes its share of each row in a process of its own, so that the others go on after a row that fails or
hangs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.chunk_ranks_worker import RankJob, collectives, measure, training
from benchmarks.fresh import CallFailedError, FreshProcesses
from benchmarks.results import Check, Result
from benchmarks.sweep import PRELOAD, Row, Sweep, add_arguments
from benchmarks.training import GIB

COLUMNS = [
    ("mode", "Mode", "{}"),
    ("step_ms", "Step (ms)", "{:.0f}"),
    ("tflops", "Model TFLOP/s for each GPU", "{:.0f}"),
    ("scaling", "/ one GPU", "{:.3f}"),
    ("peak_gib", "Peak (GiB)", "{:.1f}"),
    ("host_gib", "Host memory (GiB)", "{:.1f}"),
    ("equal", "Bit-equal", "{}"),
    ("loss_difference", "Losses off by", "{:g}"),
    ("gather_gbps", "All-gather (GB/s)", "{:.0f}"),
    ("gather_ratio", "/ calls of that size", "{:.2f}"),
    ("gather_large_ratio", "/ one large", "{:.2f}"),
    ("reduce_gbps", "Reduce-scatter (GB/s)", "{:.0f}"),
    ("reduce_ratio", "/ calls of that size", "{:.2f}"),
    ("reduce_large_ratio", "/ one large", "{:.2f}"),
]
LEAST_SCALING = 0.95
LEAST_RATE = 0.9
PRELOADED = (*PRELOAD, "benchmarks.chunk_ranks_worker")
_LONGEST_SILENCE = timedelta(minutes=10)  # of a rank that makes a row alone


@dataclass(frozen=True, kw_only=True)
class Way:
    """One row.

    Attributes:
        title: of it.
        work: of each rank.
        way: to train.
        alone: whether only the first rank does it.
        all_batches: whether each step takes all ranks' batches, one after the other.
        compares: whether results are compared.
        is_timed: whether there are steps for that.
    """

    title: str
    work: Callable[[RankJob], Row] = training
    way: str = "chunks"
    alone: bool = False
    all_batches: bool = False
    compares: bool = False
    is_timed: bool = True


WAYS = {
    "one": Way(title="chunks, one GPU", alone=True),
    "all": Way(title="chunks, all GPUs", compares=True),
    "collectives": Way(title="collectives of chunks", work=collectives),
    "fsdp": Way(title="FSDP2, all GPUs", way="fsdp"),
    "accumulated": Way(
        title="chunks, one GPU, all batches accumulated", alone=True, all_batches=True, compares=True, is_timed=False
    ),
}


class Together:
    """This rank's share of rows, which the first rank decides on.

    Args:
        given: the command line.
        processes: in which rows are made.
        folder: where ranks meet.
    """

    def __init__(self, given: argparse.Namespace, processes: FreshProcesses, folder: Path) -> None:
        self.given = given
        self.processes = processes
        self.folder = folder
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def follow(self) -> None:
        """Does what the first rank does, until it has ended."""
        while (decided := _of_first(None)) is not None:
            self._share(*decided)

    def lead(self, key: str, seconds: float) -> Row:
        """The row of all ranks; one with an error, if any has failed."""
        _of_first((key, seconds))
        shares = self._share(key, seconds)
        errors = [f"rank {rank}: {one['error']}" for rank, one in enumerate(shares) if "error" in one]
        return {"error": "; ".join(errors)} if errors else _joined([one for one in shares if one])

    def _share(self, key: str, seconds: float) -> list[Row]:
        """All ranks' answers, on every rank."""
        share: Row = {}
        if self.rank == 0 or not WAYS[key].alone:
            try:
                share = self.processes.call(measure, self._job(key), seconds=seconds)
            except CallFailedError as error:
                share = {"error": str(error)}
        shares: list[Row] = [{}] * self.world
        dist.all_gather_object(shares, share)
        return shares

    def _job(self, key: str) -> RankJob:
        way = WAYS[key]
        return RankJob(
            work=way.work,
            way=way.way,
            device=self.given.device,
            tiny=self.given.tiny,
            rank=self.rank,
            world=1 if way.alone else self.world,
            meeting=str(self.folder / key),
            batches=range(self.world) if way.all_batches else (self.rank,),
            compares=way.compares,
            steps=self.given.steps if way.is_timed else 0,
        )


def _of_first(value: Any) -> Any:
    """What the first rank says to all."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _joined(shares: Sequence[Row]) -> Row:
    """The first rank's row, with the most memory of any, and the losses of each step on all batches."""
    row = dict(shares[0])
    for name in ("peak", "host"):
        row[f"{name}_gib"] = max(one[f"{name}_bytes"] for one in shares) / GIB
    if "losses" in row:
        row["losses"] = [list(chain(*of_step)) for of_step in zip(*(one["losses"] for one in shares), strict=True)]
    if "step_ms" in row:
        row["tflops"] = 6 * row["parameters"] * row["tokens"] / row["step_ms"] / 1e9
    for name in ("gather", "reduce"):
        if f"{name}_gbps" in row:
            row[f"{name}_ratio"] = row[f"{name}_gbps"] / row[f"{name}_calls_gbps"]
            row[f"{name}_large_ratio"] = row[f"{name}_gbps"] / row[f"{name}_plain_gbps"]
    return row


def judge(rows: Sequence[Row]) -> Iterator[Check]:
    """The checks of the rows; adds to them what others say of them."""
    found = {row["key"]: row for row in rows}
    one, every = found.get("one"), found.get("all")
    if one is not None:
        for row in rows:
            if "tflops" in row:
                row["scaling"] = row["tflops"] / one["tflops"]
    if every is not None and "scaling" in every and every["device"] != "cpu":
        yield _at_least("TFLOP/s of each of all GPUs over those of one", every["scaling"], LEAST_SCALING)
    rates = found.get("collectives")
    if rates is not None and rates["device"] != "cpu":
        for name, title in (("gather", "all-gather"), ("reduce", "reduce-scatter")):
            yield _at_least(f"{title} of chunks over calls of their size", rates[f"{name}_ratio"], LEAST_RATE)
    if every is not None and "accumulated" in found:
        yield from _compare(every, found["accumulated"])


def _compare(every: Row, accumulated: Row) -> Iterator[Check]:
    """Two ranks have the bits of one process; of more it is told how far losses are off."""
    same = every["digest"] == accumulated["digest"]
    pairs = zip(every["losses"], accumulated["losses"], strict=False)  # one of them has been timed, too
    every["equal"] = "yes" if same else "no"
    every["loss_difference"] = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
    if every["world"] == 2:
        ok = same and every["loss_difference"] == 0
        measured = "yes" if ok else f"no, losses differ by up to {every['loss_difference']:g}"
        yield Check(what="all GPUs train as one process does: bit-equal", target="yes", measured=measured, ok=ok)


def _at_least(what: str, measured: float, least: float) -> Check:
    return Check(what=what, target=f"at least {least:g}", measured=round(measured, 4), ok=measured >= least)


def run_rows(together: Together, sweep: Sweep) -> None:
    """Makes the rows that the command line names, as long as the next one is expected to end in time."""
    longest_s = 0.0
    for key in filter(sweep.wants, sweep.keys):
        way = WAYS[key]
        print(f"--- {key}: {way.title}", flush=True)
        began_s = time.monotonic()
        if not sweep.out_of_time and sweep.seconds_left > longest_s:
            row = together.lead(key, min(together.given.row_seconds, sweep.seconds_left))
        elif sweep.row(key) is None:
            row = {"error": f"not run: {together.given.seconds:.0f} s were nearly over"}
        else:
            continue
        took_s = time.monotonic() - began_s
        longest_s = max(longest_s, took_s)
        facts = {"key": key, "mode": way.title, "device": sweep.device, "world": together.world, "took_s": took_s}
        sweep.put({**facts, **row})
    sweep.finish()


def parse_args() -> argparse.Namespace:
    """The words of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, seconds=180)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.set_defaults(row_seconds=70)
    return parser.parse_args()


def main() -> None:
    """Joins the ranks: the first one decides and writes, the others follow."""
    given = parse_args()
    if given.list:
        print("\n".join(WAYS))
        return
    dist.init_process_group("gloo", timeout=_LONGEST_SILENCE)
    rank, world = dist.get_rank(), dist.get_world_size()
    if world < 2:
        raise SystemExit(f"expected at least 2 ranks, found {world}; start it with torchrun --nproc-per-node 2")
    with tempfile.TemporaryDirectory() as own:
        folder = Path(_of_first(own))
        if rank == 0:
            title = f"GPT 1.3B in mixed precision with AdamW, 16 x 2048 tokens for each of {world} GPUs, checkpointed"
            result = Result(name=f"chunk_ranks_{world}", title=title, columns=COLUMNS)
            sweep = Sweep(result, given, list(WAYS), judge, PRELOADED, device=given.device)
            try:
                run_rows(Together(given, sweep.processes, folder), sweep)
            finally:
                _of_first(None)
        else:
            Together(given, FreshProcesses.for_device(given.device, PRELOADED), folder).follow()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
