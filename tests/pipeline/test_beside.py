from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
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
from torch_lms.profile.constraints import COMPUTED
from torch_lms.profile.tracing import trace
from torch_lms.ranks.circle import CountingStore
from torch_lms.ranks.members import find_members
from torch_lms.stages.cutting import split
from torch_lms.stages.stage import Stage


def cut(model: nn.Module, x: torch.Tensor, count: int) -> list[Stage]:
    found = trace(model, (x,))
    assert found.graph_module is not None
    names = [node.name for node in found.graph_module.graph.nodes if node.op in COMPUTED]
    return split(found, {name: place * count // len(names) for place, name in enumerate(names)}, model=model)


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


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    more: tuple[torch.Tensor, ...] = ()
    name: str = ""


def test_outputs_that_are_dataclasses_are_merged_field_by_field() -> None:
    merged = merge_outputs([Output(torch.full((2, 3), float(k)), (torch.ones(1) * k,), "both") for k in range(2)])
    assert isinstance(merged, Output)
    assert merged.logits[:, 0].tolist() == [0, 0, 1, 1]
    assert merged.more[0].tolist() == [0, 1]
    assert merged.name == "both"


def test_outputs_that_are_dicts_of_a_type_keep_it() -> None:
    parts: list[Any] = [defaultdict(list, x=torch.ones(2)), defaultdict(list, x=torch.ones(2))]
    merged = merge_outputs(parts)
    assert merged["x"].shape == (4,)
    assert merged["y"] == []


@pytest.mark.parametrize("output", [SimpleNamespace(x=torch.ones(2)), UserDict(x=torch.ones(2))])
def test_outputs_that_cannot_be_merged_are_refused(output: Any) -> None:
    with pytest.raises(PipelineError, match=f"found {type(output).__name__}; have the model return one of these"):
        merge_outputs([output, output])


def test_stages_evaluate_in_evaluation_and_are_then_as_they_were() -> None:
    stage: Any = cut(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Dropout().eval()), torch.ones(2, 4), 1)[0]
    modes = [module.training for module in stage.modules()]
    with evaluating([stage]):
        assert not any(module.training for module in stage.modules())
        assert not stage(torch.ones(2, 4)).requires_grad
    assert [module.training for module in stage.modules()] == modes


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training else x


def test_stages_whose_code_is_for_training_alone_do_not_evaluate() -> None:
    stage = cut(Branch(), torch.ones(2), 1)[0]
    with pytest.raises(PipelineError, match="expected the model in training"), evaluating([stage]):
        pass
    assert stage.training


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
