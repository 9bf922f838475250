"""What is left of a process group when it has been destroyed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "meeting")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert int(found.stdout) == 0
