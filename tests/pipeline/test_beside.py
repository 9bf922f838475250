from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.pipeline.ranks import run_ranks
from torch_lms import _torch_compat
from torch_lms.errors import PipelineError
from torch_lms.pipeline.boundary import Boundary, Microbatch
from torch_lms.pipeline.config import PipelineConfig
from torch_lms.pipeline.evaluation import evaluating, merge_outputs
from torch_lms.pipeline.loss_scale import PipelineGradScaler
from torch_lms.ranks.circle import CountingStore
from torch_lms.ranks.members import find_members

of_export = pytest.mark.skipif(not hasattr(torch, "export"), reason="no graph of torch.export has such calls")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "world"),
    [
        ("two_ranks+tests.pipeline.precision_scenarios:two_ranks", 2),
        ("compiled", 2),
        ("middle_rank", 3),
        ("four_ranks+tests.pipeline.precision_scenarios:four_ranks", 4),
        ("fails_and_stays", 4),
    ],
)
def test_ranks(scenario: str, world: int, tmp_path: Path) -> None:
    for ended in run_ranks(f"tests.pipeline.beside_scenarios:{scenario}", world, tmp_path, timeout_s=150):
        assert ended.status == 0, ended.output


def boundary() -> Boundary:
    stage: Any = nn.Identity()
    stage.index, stage.count = 0, 1
    return Boundary(stage, torch.device("cpu"), None, 2, host_values=cast(Any, None), carries_random=False)


@pytest.mark.parametrize("made", [dict, OrderedDict, lambda **values: SimpleNamespace(**values)])
def test_an_output_that_holds_its_loss_needs_no_loss_function(made: Any) -> None:
    loss = boundary().loss_of(made(loss=torch.tensor(3.0), logits=torch.ones(2)), Microbatch({}))
    assert loss.item() == 1.5


@pytest.mark.parametrize("result", [{"logits": torch.ones(2)}, {"loss": None}, torch.ones(2), None])
def test_an_output_without_a_loss_is_refused(result: Any) -> None:
    with pytest.raises(PipelineError, match=r"a loss of one element.*pass loss="):
        boundary().loss_of(result, Microbatch({}))


def test_outputs_of_microbatches_become_those_of_the_batch() -> None:
    parts = [{"x": (torch.full((2, 3), float(k)), None), "loss": torch.tensor(float(k))} for k in range(2)]
    merged = merge_outputs(parts)
    assert merged["x"][0][:, 0].tolist() == [0, 0, 1, 1]
    assert merged["x"][1] is None
    assert merged["loss"].tolist() == [0, 1]


@pytest.mark.parametrize(
    "run",
    [
        lambda x: nn.functional.dropout(x, 0.5, True),
        lambda x: nn.functional.dropout(x, p=0.5, training=True),
        lambda x: torch.dropout(x, 0.5, True),
        pytest.param(lambda x: torch.ops.aten.dropout.default(x, 0.5, True), marks=of_export),
        pytest.param(
            lambda x: torch.ops.aten.batch_norm.default(
                x, None, None, torch.zeros(4), torch.ones(4), True, 0.1, 0.0, False
            ),
            marks=of_export,
        ),
        lambda x: nn.functional.batch_norm(x, torch.zeros(4), torch.ones(4), training=True, eps=1e-45),
        lambda x: nn.Sequential(nn.Dropout(0.5))(x),
    ],
)
def test_what_was_written_down_for_training_is_not_so_while_stages_evaluate(run: Any) -> None:
    x = torch.arange(8.0).view(2, 4)
    assert not torch.equal(run(x), x)
    module = nn.Dropout()
    with evaluating([module]):
        assert not module.training
        found = run(x)
    assert torch.equal(found, x)
    assert module.training


def test_without_torch_distributed_groups_are_refused() -> None:
    with pytest.raises(PipelineError, match="initialised"):
        find_members(None, "group")


@pytest.mark.parametrize("given", [torch.float32, torch.int8, "float16", True])
def test_autocast_takes_16_bits(given: Any) -> None:
    with pytest.raises(ValueError, match=r"torch\.float16, torch\.bfloat16 or None for autocast, found"):
        PipelineConfig(autocast=given)


def test_where_pytorch_scales_losses_on_cuda_alone_float16_is_refused_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Old:
        def __init__(self, init_scale: float = 2.0**16) -> None: ...

    monkeypatch.setattr(_torch_compat, "GradScaler", Old)
    assert _torch_compat.grad_scaler_options(torch.device("cuda")) == {}
    nothing: Any = None
    with pytest.raises(PipelineError, match=r"a loss scale for float16 on cpu.*CUDA alone; take autocast="):
        PipelineGradScaler(nothing, torch.device("cpu"), nothing)


def test_a_timeout_has_to_be_positive() -> None:
    with pytest.raises(ValueError, match="heartbeat_timeout_s"):
        PipelineConfig(heartbeat_timeout_s=0)


def test_a_store_without_check_counts_what_was_set() -> None:
    store = CountingStore(torch.distributed.HashStore())
    assert not store.check(["a"])
    store.set("a", b"one")
    store.set("a", b"\x00two")
    assert store.check(["a"])
    assert store.get("a") == b"\x00two"
    assert not store.check(["a", "b"])
    store.delete_key("a")
    assert not store.check(["a"])
