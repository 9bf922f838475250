from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torch_lms.errors import PipelineError
from torch_lms.pipeline.boundary import Microbatch
from torch_lms.pipeline.config import PipelineConfig
from torch_lms.pipeline.liveness import in_words
from torch_lms.pipeline.microbatches import cut_batch, name_arguments, to_device
from torch_lms.pipeline.runner import _check_whole
from torch_lms.pipeline.training import _find_optimizer, _first_microbatch
from torch_lms.ranks.members import find_own_device
from torch_lms.stages.arguments import Argument

ARGUMENTS = (
    Argument("ids"),
    Argument("mask", required=False),
    Argument("scale", required=False, default=2),
    Argument("flag", required=False, default=True, constant=True),
    Argument("pair", parts=("pair_0", "pair_1")),
)


def test_tensors_are_cut_and_everything_else_goes_to_each_microbatch() -> None:
    table = torch.ones(5, 5)
    values = {
        "ids": torch.arange(6),
        "nest": {"a": (torch.arange(6), "x")},
        "flag": True,
        "zero": torch.tensor(3),
        "t": table,
    }
    made = cut_batch(values, 3, whole=("t",))
    assert torch.cat([part["ids"] for part in made]).tolist() == list(range(6))
    assert [part["nest"]["a"][0].tolist() for part in made] == [[0, 1], [2, 3], [4, 5]]
    assert all(part["flag"] is True and part["t"] is table and part["zero"].item() == 3 for part in made)


class Encoding(UserDict[str, Any]):
    """Like a BatchEncoding of transformers: a mapping, but no dict."""


def test_any_mapping_is_cut_and_moved_as_a_dict_is() -> None:
    batch = Encoding(ids=torch.arange(6), inner=MappingProxyType({"mask": torch.ones(6)}))
    made = [to_device(part, torch.device("meta")) for part in cut_batch({"batch": batch, "n": 2}, 3)]
    assert [part["n"] for part in made] == [2, 2, 2]
    for part in made:
        assert part["batch"].keys() == {"ids", "inner"}
        for tensor in (part["batch"]["ids"], part["batch"]["inner"]["mask"]):
            assert (tensor.shape, tensor.device.type) == ((2,), "meta")


@pytest.mark.parametrize("kind", [dict, Encoding, MappingProxyType])
def test_a_sample_that_is_a_mapping_holds_arguments_by_name(kind: Callable[[Any], Any]) -> None:
    class Model(nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return ids * mask

    sample = kind({"mask": torch.ones(6), "ids": torch.arange(6)})
    args, kwargs = _first_microbatch(Model(), sample, PipelineConfig(microbatches=3))
    assert args == ()
    assert (kwargs["ids"].tolist(), kwargs["mask"].tolist()) == ([0, 1], [1, 1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ids": torch.ones(7)}, "4 microbatches divide, found 7.*batch of 4"),
        ({"ids": torch.ones(3)}, "found 3.*batch of 4"),
        ({"ids": torch.ones(8), "mask": torch.ones(4)}, "8 of 'ids' and 4 of 'mask'.*whole="),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        cut_batch(values, 4)


def test_arguments_get_their_names_and_defaults_and_may_be_left_out() -> None:
    assert name_arguments(ARGUMENTS, (1,), {"scale": 3}) == {"ids": 1, "mask": None, "scale": 3}
    assert name_arguments(ARGUMENTS, (), {}) == {"mask": None, "scale": 2}
    left, right = torch.ones(1), torch.ones(2)
    nest = name_arguments(ARGUMENTS, (), {"pair": {"a": left, "b": (right, 7)}, "flag": True})
    assert (nest["pair_0"] is left, nest["pair_1"] is right, "flag" in nest) == (True, True, False)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1, 2, 3, 4, 5, 6), {}, "at most 5"),
        ((), {"labels": 1}, "'labels'"),
        ((1,), {"ids": 1}, "'ids' twice"),
        ((), {"flag": False}, "flag=True.*found False"),
        ((), {"pair": [torch.ones(1)]}, "2 tensors in 'pair'.*found 1"),
    ],
)
def test_arguments_that_the_graph_has_not_are_refused(
    args: tuple[int, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        name_arguments(ARGUMENTS, args, kwargs)


def test_a_microbatch_that_is_written_to_leaves_the_others_as_they_were_saved() -> None:
    batch = torch.ones(4, 2)
    weight = torch.ones(2, requires_grad=True)
    losses = []
    for part in cut_batch({"x": batch}, 2):
        part["x"].mul_(2)
        losses.append((part["x"] * weight).sum())
    sum(losses).backward()
    assert torch.equal(batch, torch.full((4, 2), 2.0))
    assert torch.equal(weight.grad, torch.full((2,), 8.0))


def test_a_batch_with_gradients_has_them_from_all_microbatches() -> None:
    batch = torch.ones(4, 2, requires_grad=True)
    sum((part["x"] * 3).sum() for part in cut_batch({"x": batch}, 2)).backward()
    assert torch.equal(batch.grad, torch.full((4, 2), 3.0))


def test_a_text_is_no_list_of_names() -> None:
    with pytest.raises(ValueError, match=r"take \('mask',\)"):
        PipelineConfig(microbatches=2, whole="mask")  # type: ignore[arg-type]


def test_a_run_before_all_others_writes_to_tensors_of_its_own() -> None:
    feeds, target = {"x": torch.ones(2), "nest": [torch.ones(2), 5]}, torch.ones(2)
    early = Microbatch(feeds, target, None, number=0).before_all()
    early.feeds["x"].mul_(2)
    early.feeds["nest"][0].mul_(2)
    early.target.mul_(2)
    assert early.feeds["nest"][1] == 5
    assert all(torch.equal(one, torch.ones(2)) for one in (feeds["x"], feeds["nest"][0], target))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("in a loss,\n  here"), "ValueError: in a loss, here"),
        (PipelineError("expected one"), "PipelineError: expected one"),
    ],
)
def test_other_ranks_are_told_what_an_error_began_with(error: Exception, words: str) -> None:
    outer = RuntimeError("[Stage 1] failed to run forward:\n args")
    outer.__cause__ = error
    error.__cause__ = KeyError("x") if isinstance(error, PipelineError) else None
    assert in_words(outer) == words


@pytest.mark.parametrize("sample", [{"y": torch.ones(2)}, (torch.ones(2), torch.ones(2))])
def test_a_sample_of_other_arguments_is_refused(sample: Any) -> None:
    with pytest.raises(PipelineError, match=r"expected a sample of the arguments of Linear.forward\(input"):
        _first_microbatch(nn.Linear(2, 2), sample, PipelineConfig(microbatches=2))


@pytest.mark.parametrize(
    "given",
    [{"microbatches": "2"}, {"microbatches": 2.0}, {"seed": "a"}, {"bucket_bytes": True}, {"heartbeat_timeout_s": "1"}],
)
def test_a_config_takes_numbers(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"for {next(iter(given))}, found"):
        PipelineConfig(**given)


def test_whole_names_arguments() -> None:
    arguments = (Argument("ids"), Argument("mask", parts=("mask_0", "mask_1")))
    _check_whole(("ids", "mask_1", "mask"), arguments)
    with pytest.raises(PipelineError, match=r"in whole, among ids, mask, .*found 'other'; leave it out"):
        _check_whole(("ids", "other"), arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.optim.SGD([torch.ones(1)], lr=0.1), r"pass a function that makes it, such as partial\(torch.optim.SGD"),
        (3, "the name of an optimizer, or a function of parameters that makes one, found 3"),
        ("no such", "an optimizer among .*found 'no such'"),
    ],
)
def test_what_makes_no_optimizer_is_refused(given: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        _find_optimizer(given)


@pytest.mark.parametrize("device", ["no such", 1.5])
def test_what_is_no_device_is_refused(device: Any) -> None:
    members: Any = SimpleNamespace(on_nccl=False)
    with pytest.raises(PipelineError, match=f"a device such as 'cuda:0', found {device!r}"):
        find_own_device(members, device)
