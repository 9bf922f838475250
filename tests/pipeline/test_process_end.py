"""What is left of a process group when it has been destroyed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.fresh_process import run_python
from torch_lms.pipeline.torch_backend import is_available

# Prints how many of Gloo's threads are left.
PROGRAM = """
import sys
import torch
import torch.distributed as dist
import torch_lms.pipeline
from tests.pipeline.ranks import threads_left_of_gloo, threads_of_gloo
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
dist.all_reduce(torch.ones(8))  # a thread names itself when it first runs
assert threads_of_gloo() > 0
%s
dist.destroy_process_group()
print(threads_left_of_gloo())
"""

IMPORT = "import torch.distributed.pipelining"

TRAIN = """
model, batch = nn.Linear(4, 4), torch.ones(4, 4)
how = dict(microbatches=2, loss=nn.functional.mse_loss, executor="%s")
pipeline = torch_lms.pipeline.train(model, group, (batch,), **how)
pipeline.step(batch, target=torch.zeros(4, 4))
"""

# The pipeline is still there when the group is destroyed.
WORLD = f"""
group = None
{TRAIN}
"""

# What is imported only when it is needed keeps the frames that have asked for it, until there is a collection.
GIVEN = f"""
import gc, torch._dynamo
gc.disable()
group = dist.new_group([0])
{TRAIN}
del pipeline, group
"""


@pytest.mark.skipif(not is_available(), reason="this PyTorch gives its threads no names")
@pytest.mark.parametrize(
    "use",
    [IMPORT, WORLD % "own", WORLD % "torch", GIVEN % "own", GIVEN % "torch"],
    ids=["import", "own", "torch", "own, a given group", "torch, a given group"],
)
def test_no_thread_of_a_group_outlives_it(use: str, tmp_path: Path) -> None:
    """See Note [Groups that outlive their end]."""
    ended = run_python("-c", PROGRAM % use, str(tmp_path / "meeting"))
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) == 0
