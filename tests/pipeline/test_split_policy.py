from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_lms.balanced import BalanceConfig
from torch_lms.errors import PipelineError
from torch_lms.pipeline.split_policy import balanced_split_policy, insert_splits
from torch_lms.pipeline.torch_backend import is_available
from torch_lms.profile.profiler import ProfileConfig


class Branches(nn.Module):
    """Two branches, of which one is needed late."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.left(x)
        right = torch.tanh(self.right(x))
        return self.last(torch.relu(left)) + right


@pytest.mark.skipif(not is_available(), reason="this PyTorch has no torch.distributed.pipelining")
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_pipeline_of_pytorch_is_cut_by_our_partition(stages: int) -> None:
    from torch.distributed.pipelining import pipeline

    torch.manual_seed(0)
    model, x = Branches(), torch.rand(2, 4)
    config = BalanceConfig(profile=ProfileConfig(warmup_runs=1, timed_runs=2, progress=False))
    policy = balanced_split_policy(["cpu"] * stages, x, config=config)
    pipe = pipeline(model, mb_args=(x,), split_policy=policy)
    assert pipe.num_stages == stages
    assert torch.equal(pipe(x)[0] if isinstance(pipe(x), tuple) else pipe(x), model(x))


@pytest.mark.skipif(not is_available(), reason="this PyTorch has no torch.distributed.pipelining")
def test_nodes_come_into_the_order_of_their_stages() -> None:
    from torch import fx

    traced, x = fx.symbolic_trace(Branches()), torch.rand(2, 4)
    expected = traced(x)
    insert_splits(traced, {"left": 0, "right": 1, "tanh": 1, "relu": 0, "last": 0, "add": 1})
    names = [node.name for node in traced.graph.nodes if node.op.startswith("call_")]
    assert names == ["left", "relu", "last", "_pipe_split_default", "right", "tanh", "add"]
    assert torch.equal(traced(x), expected)


@pytest.mark.skipif(is_available(), reason="this PyTorch has torch.distributed.pipelining")
def test_without_pipelining_the_other_way_is_named() -> None:
    from torch import fx

    with pytest.raises(PipelineError, match=r"torch_lms\.pipeline\.Pipeline"):
        insert_splits(fx.symbolic_trace(Branches()), {})
