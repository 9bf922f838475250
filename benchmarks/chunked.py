"""Mixed-precision training of a GPT with model data in chunks, beside the same with everything on the device.

    python -m benchmarks.chunked --only 'plain,*'      # an H200
    python -m benchmarks.chunked --only host-backward,stream-backward --hidden
    python -m benchmarks.chunked --tiny --output-dir /tmp/out

With `--hidden` each row says how much of its updates' time was hidden behind the backward, in one step more; `--keep`
writes when they ran, for chrome://tracing.

DeepSpeed's row needs `pip install deepspeed` and ninja, which compiles its optimizer when it first runs.

Every row trains in 16 bits with 32-bit masters and fused AdamW, its blocks checkpointed. Plain keeps masters by hand.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import torch_lms
from benchmarks import peers
from benchmarks.equal_peak import at_most
from benchmarks.plan_worker import Paging, Run
from benchmarks.results import Check, Result
from benchmarks.sweep import Row, Sweep, add_arguments, run_rows
from benchmarks.training import GIB
from benchmarks.workloads import Program
from torch_lms.chunk import ChunkedOptimizer

COLUMNS = [
    ("mode", "Mode", "{}"),
    ("step_ms", "Step (ms)", "{:.0f}"),
    ("ratio", "/ plain", "{:.2f}"),
    ("peak_gib", "Peak (GiB)", "{:.1f}"),
    ("out_gib", "Paged out a step (GiB)", "{:.1f}"),
    ("in_gib", "In a step (GiB)", "{:.1f}"),
    ("equal", "Bit-equal", "{}"),
    ("hidden_share", "Updates hidden", "{:.0%}"),
]
LEARNING_RATE = 1e-4
COMPARED_AFTER = (11, 40)  # steps; a program with a limit has a plan by the last


class HandWritten:
    """A 16-bit model, 32-bit masters of it on the device, and fused AdamW: what chunks are compared with."""

    def __init__(self, program: Program) -> None:
        self.parameters = list(program.model.parameters())
        self.masters = [one.detach().float() for one in self.parameters]
        for parameter in self.parameters:
            parameter.data = parameter.data.bfloat16()
        self.adamw = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """The masters, and the parameters from them."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self.adamw.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None
            parameter.copy_(master)


class FullySharded:
    """FSDP2 with mixed precision, and fused AdamW.

    Args:
        program: whose model is sharded block by block.
        mesh: of the ranks.
        offload: whether parameters and optimizer state are on the host, and updated there.
    """

    def __init__(self, program: Program, mesh: DeviceMesh, *, offload: bool) -> None:
        program.model.float()
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        for block in program.blocks:
            fully_shard(block, reshard_after_forward=True, **options)
        fully_shard(program.model, **options)
        self.adamw = torch.optim.AdamW(program.model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self) -> None:
        """The parameters, where they are."""
        self.adamw.step()


def begin_one_rank(program: Program) -> str:
    """`torch.distributed` for one rank; the kind of the program's device."""
    device = next(program.model.parameters()).device.type
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    return device


def fully_sharded(program: Program) -> FullySharded:
    """FSDP2 on one rank, with everything on the host that can be."""
    device = begin_one_rank(program)
    return FullySharded(program, init_device_mesh(device, (1,)), offload=device == "cuda")


def zero_offload(program: Program) -> Any:
    """DeepSpeed's ZeRO-Offload on one rank."""
    from benchmarks.zero_offload import ZeroOffload  # DeepSpeed need not be installed for the other rows

    begin_one_rank(program)
    return ZeroOffload(program, LEARNING_RATE)


def in_chunks(program: Program, **options: Any) -> torch.optim.Optimizer:
    """The program's model in chunks; its optimizer."""
    adamw = torch.optim.AdamW(program.model.parameters(), lr=LEARNING_RATE, fused=True)
    return torch_lms.chunked(program.model, adamw, **options)[1]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train.

    Attributes:
        title: of its row.
        limit_gib: of the device; None for all of it.
        options: of `torch_lms.chunked`.
        peer: what trains instead of it.
        most_ms: that a step may take.
        comparable: whether results are plain's: the host's processor rounds differently.
    """

    title: str
    limit_gib: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    peer: Callable[[Program], Any] | None = None
    most_ms: float | None = None
    comparable: bool = True


ON_DEVICE = {"update_on": "device"}
ON_HOST = {"update_on": "host"}
STREAMED = {"update_on": "stream"}
WAYS = {
    "plain": Way(title="everything on the device, by hand", peer=HandWritten),
    "fsdp": Way(title="FSDP2 with CPUOffloadPolicy", peer=fully_sharded, comparable=False),
    "deepspeed": Way(title="DeepSpeed ZeRO-2 with its optimizer offloaded", peer=zero_offload, comparable=False),
    "device": Way(title="chunks, on the device", options=ON_DEVICE),
    "device-12": Way(title="chunks, paged by automatic mode, within 12 GiB", limit_gib=12, options=ON_DEVICE),
    "host": Way(title="chunks, updated on the host", options=ON_HOST, comparable=False),
    "host-backward": Way(
        title="chunks, updated on the host, in backward",
        options={**ON_HOST, "step_in_backward": True},
        most_ms=690,
        comparable=False,
    ),
    "stream": Way(title="chunks, streamed through the device", options=STREAMED),
    "stream-backward": Way(
        title="chunks, streamed through the device, in backward",
        options={**STREAMED, "step_in_backward": True},
        most_ms=690,
    ),
    "auto-12": Way(title="chunks, as they are by default, within 12 GiB", limit_gib=12),
    "stream-12": Way(
        title="chunks, streamed, in backward, within 12 GiB",
        limit_gib=12,
        options={**STREAMED, "step_in_backward": True},
        most_ms=720,
    ),
}


def hidden_share(optimizer: Any, step: Callable[[], None], keep: str) -> Row:
    """How much of a step's updates hides behind its backward; nothing where the program itself waits for them."""
    if not isinstance(optimizer, ChunkedOptimizer):
        return {}
    with optimizer.record_updates() as timeline:
        step()
    if timeline.hidden_share is None:
        return {}
    if keep:
        Path(keep).parent.mkdir(parents=True, exist_ok=True)
        timeline.write_trace(f"{keep}.updates.json")
    return {"hidden_share": timeline.hidden_share, "update_ms": timeline.update_us / 1e3}


def results_are_same(row: Row, plain: Row) -> bool:
    """Whether all losses that both have are, and what has been compared after as many steps."""
    count = min(len(row["losses"]), len(plain["losses"]))
    digests = row["digests"].keys() & plain["digests"].keys()
    return (
        bool(digests)
        and row["losses"][:count] == plain["losses"][:count]
        and all(row["digests"][steps] == plain["digests"][steps] for steps in digests)
    )


def judge(rows: Sequence[Row]) -> Iterator[Check]:
    """The checks of the rows; adds to them what plain says of them."""
    found = {row["key"]: row for row in rows}
    plain = found.get("plain")
    for key, row in found.items():
        way = WAYS[key]
        if plain is not None:
            row["ratio"] = row["step_ms"] / plain["step_ms"]
            same = results_are_same(row, plain)
            row["equal"] = ("yes" if same else "no") if way.comparable else "-"
            if way.comparable:
                yield Check(what=f"{way.title}: bit-equal", target="yes", measured=row["equal"], ok=same)
        if way.most_ms is not None and row["device"] != "cpu":
            yield at_most(f"{way.title}: step (ms)", row["step_ms"], way.most_ms)


def measure_row(sweep: Sweep, key: str) -> None:
    """Trains in one way."""
    way, given = WAYS[key], sweep.given
    limit_bytes = None if way.limit_gib is None else way.limit_gib * GIB
    if given.tiny and limit_bytes is not None:
        plain = sweep.row("plain")
        limit_bytes = int(plain["peak_bytes"] * 0.7) if plain is not None else None
    run = Run(
        workload="gpt",
        device=sweep.device,
        tiny=given.tiny,
        change=peers.checkpoint_blocks,
        optimizer=True,
        optimize=way.peer or partial(in_chunks, **way.options),
        paging=None if limit_bytes is None else Paging(limit_bytes=limit_bytes),
        steps=given.steps,
        digests_after=COMPARED_AFTER if way.comparable else (),
        with_digest=way.comparable,
        record=hidden_share if given.hidden else None,
        least_steps=COMPARED_AFTER[-1] if way.limit_gib is not None or way.peer is HandWritten else 0,
    )
    facts: Row = {} if limit_bytes is None else {"limit_bytes": limit_bytes}
    sweep.run(key, way.title, run, **facts)


def main() -> None:
    """Runs the rows that the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, seconds=300)
    parser.add_argument("--hidden", action="store_true", help="say how much of the updates hides behind the backward")
    given = parser.parse_args()
    title = "GPT 1.3B in mixed precision with AdamW, 16 x 2048 tokens, blocks checkpointed"
    run_rows(Result(name="chunked", title=title, columns=COLUMNS), given, list(WAYS), judge, measure_row)


if __name__ == "__main__":
    main()
