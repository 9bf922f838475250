"""What is left of a process group when it has been destroyed."""

from __future__ import annotations

from pathlib import Path

from tests.unit.fresh_process import run_python

# In a process of its own, whose threads are Gloo's alone.
PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
import torch_lms.pipeline
torch.set_num_threads(1)
threads = len(os.listdir("/proc/self/task"))
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
import torch.distributed.pipelining
dist.all_reduce(torch.ones(8))
dist.destroy_process_group()
print(len(os.listdir("/proc/self/task")) - threads)
"""


def test_no_thread_of_a_group_outlives_it(tmp_path: Path) -> None:
    """See Note [Groups that outlive their end]."""
    ended = run_python("-c", PROGRAM, str(tmp_path / "meeting"))
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) == 0
