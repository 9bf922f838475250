"""Starts ranks as processes with a hard limit in time, and is what they run: ``python -m tests.pipeline.ranks``."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.forked import ROOT, Program, run_programs


@dataclass(frozen=True)
class Ended:
    """How a rank ended; a status below 0 is a signal."""

    status: int
    output: str


def run_ranks(scenario: str, world: int, tmp_path: Path, *, timeout_s: float = 150, store: str = "file") -> list[Ended]:
    """Runs ``module:function`` on ranks over Gloo; whoever runs too long is killed, with status -9.

    Several functions, joined by ``+``, run one after the other, those without a module in that of the one before. With
    ``store="tcp"`` rank 0 keeps the store. With ``TORCH_LMS_TEST_DEVICE=cuda`` over NCCL.
    """
    meeting = f"file://{tmp_path / 'meeting'}" if store == "file" else f"tcp://127.0.0.1:{_free_port()}"
    programs = [
        Program(
            "tests.pipeline.ranks",
            [scenario, str(rank), str(world), meeting],
            tmp_path / f"rank{rank}.log",
            {"OMP_NUM_THREADS": "1", "TORCH_LMS_CHAOS": "0"},
        )
        for rank in range(world)
    ]
    statuses = run_programs(programs, timeout_s=timeout_s)
    return [Ended(status, program.log.read_text()) for status, program in zip(statuses, programs, strict=False)]


def run_as_torchrun(tmp_path: Path, module: str, *words: str) -> None:
    """Runs a module on two ranks with what torchrun tells them, and without its seconds; both must succeed."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "TORCH_LMS_CHAOS": "0"}
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    programs = [
        Program(module, list(words), tmp_path / f"{rank}.log", {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    statuses = run_programs(programs, timeout_s=150)
    assert statuses == [0, 0], [program.log.read_text()[-3000:] for program in programs]


def torchrun(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program on two ranks, as users start it."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "python"),
            "OMP_NUM_THREADS": "1",
            "TORCH_LMS_CHAOS": "0",
            **environment,
        },
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=150,
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def main() -> None:
    import torch
    import torch.distributed as dist

    scenario, rank, world, meeting = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    on_cuda = os.environ.get("TORCH_LMS_TEST_DEVICE") == "cuda"
    if on_cuda:
        torch.cuda.set_device(rank)
    backend = "nccl" if on_cuda else "gloo"
    importlib.import_module("torch_lms.pipeline")  # before there is a group: Note [Groups that outlive their end]
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world)
    module = ""
    for place in scenario.split("+"):
        other, _, name = place.rpartition(":")
        module = other or module
        print("==>", place, flush=True)
        getattr(importlib.import_module(module), name)(rank, world)
    gc.collect()
    dist.destroy_process_group()
    assert not threads_left_of_gloo(), "something holds a process group that was destroyed"


def threads_of_gloo() -> int:
    """How many that hold tensors, where PyTorch gives its threads names. They name themselves, when they first run."""
    found = 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += "pt_gloo" in (thread / "comm").read_text()
    return found


def threads_left_of_gloo() -> int:
    """How many do not end. One that has been joined is listed for a moment more."""
    end = time.monotonic() + 30
    while (left := threads_of_gloo()) and time.monotonic() < end:
        time.sleep(0.01)
    return left


if __name__ == "__main__":
    main()
