"""What models are called with: dicts, arguments by name, and tensors of several lengths."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torch_lms._torch_compat import has_export
from torch_lms.errors import PartitionError
from torch_lms.profile.tracing import trace
from torch_lms.stages.arguments import Argument
from torch_lms.stages.cutting import split
from torch_lms.stages.running import run_stages
from torch_lms.stages.stage import Stage

needs_export = pytest.mark.skipif(not has_export(), reason="this PyTorch has no torch.export")


class Named(nn.Module):
    """Takes tensors by name only, in a dict, and by any other name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(
        self,
        x: torch.Tensor,
        batch: dict[str, Any],
        *more: torch.Tensor,
        bias: Any = None,
        gain: float = 1.0,
        **rest: Any,
    ) -> dict[str, Any]:
        x = self.first(x) * batch["scale"] + batch["pair"][0] * batch["factor"]
        x = self.last(x) + sum(more)
        return {"loss": x.sum(), "x": x * gain + rest["shift"] if bias is None else x + bias}


def halves(model: nn.Module, args: Any, kwargs: Any, **options: Any) -> list[Stage]:
    traced = trace(model, args, kwargs, **options)
    assert traced.graph_module is not None
    nodes = [node.name for node in traced.graph_module.graph.nodes if node.op.startswith("call_")]
    return split(traced, {name: 2 * index // len(nodes) for index, name in enumerate(nodes)}, model=model)


def inputs(seed: int) -> tuple[Any, Any]:
    a, b, c, d, e = torch.rand(5, 2, 3, generator=torch.Generator().manual_seed(seed))
    return (a, {"scale": b, "pair": (c,), "factor": 2.0}, d), {"shift": e, "gain": 0.5}


def test_dicts_starred_arguments_and_such_by_name_are_given_as_to_the_model() -> None:
    model = Named()
    stages = halves(model, *inputs(0))
    args, kwargs = inputs(1)
    expected, found = model(*args, **kwargs), run_stages(stages, *args, **kwargs)
    assert torch.equal(found["x"], expected["x"])
    assert torch.equal(found["loss"], expected["loss"])
    turned = dict(reversed(list(args[1].items())))
    assert torch.equal(run_stages(stages, args[0], turned, args[2], **kwargs)["x"], expected["x"])
    assert torch.equal(run_stages(stages, *args, bias=None, **kwargs)["x"], expected["x"])


@pytest.mark.parametrize(
    ("batch", "more", "words"),
    [
        ({"factor": 3.0}, {}, r"batch\['factor'\]=2.0, which is a constant of the graph, found 3.0"),
        ({"extra": 1}, {}, r"'batch' with \['factor', 'pair', 'scale'\].*'extra'"),
        ({"pair": ()}, {}, r"batch\['pair'\].* with 1 items.*found 0"),
        ({}, {"bias": torch.ones(3)}, r"bias=None, which is a constant.*found a tensor of shape \[3\]"),
        ({}, {"gain": 2.0}, "gain=0.5.*found 2.0"),
    ],
)
def test_what_the_trace_is_not_for_is_named(batch: Any, more: Any, words: str) -> None:
    stages = halves(Named(), *inputs(0))
    args, kwargs = inputs(1)
    with pytest.raises(PartitionError, match=words):
        run_stages(stages, args[0], {**args[1], **batch}, args[2], **{**kwargs, **more})


def test_an_argument_by_name_is_not_taken_by_place() -> None:
    stages = halves(Named(), *inputs(0))
    args, kwargs = inputs(1)
    with pytest.raises(PartitionError, match="at most 3 arguments by place"):
        run_stages(stages, *args, None, **kwargs)


class Positions(nn.Module):
    """Its code asks for the length; torch.fx alone cannot follow it."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        length = int(ids_BT.shape[1]) if self.fixed else ids_BT.shape[1]
        if length > 100:
            raise ValueError("too long")
        x_BTH = self.embed(ids_BT) + torch.arange(length)[None, :, None] / length
        return self.head(x_BTH).sum() / length


@needs_export
def test_the_stages_of_an_exported_model_take_several_lengths() -> None:
    model = Positions(fixed=False)
    stages = halves(model, (torch.ones(2, 5, dtype=torch.long),), {}, sources=["export"])
    for rows, length in ((2, 5), (3, 7), (2, 64)):
        ids = torch.randint(10, (rows, length))
        model.zero_grad(set_to_none=True)
        expected = model(ids)
        expected.backward()
        gradient = model.embed.weight.grad
        model.zero_grad(set_to_none=True)
        found = run_stages(stages, ids)
        found.backward()
        assert torch.equal(found, expected)
        assert gradient is not None
        assert torch.equal(model.embed.weight.grad, gradient)
    with pytest.raises(PartitionError, match=r"'ids_BT' of shape \[.*to 100\].*found \[2, 101\]"):
        run_stages(stages, torch.ones(2, 101, dtype=torch.long))


@needs_export
def test_a_shape_that_the_trace_wrote_down_is_named_at_the_step_that_differs() -> None:
    stages = halves(Positions(fixed=True), (torch.ones(2, 5, dtype=torch.long),), {}, sources=["export"])
    run_stages(stages, torch.ones(3, 5, dtype=torch.long))
    with pytest.raises(
        PartitionError, match=r"'ids_BT' of shape \[at least \d, 5\].*found \[2, 6\]; give it that shape"
    ):
        run_stages(stages, torch.ones(2, 6, dtype=torch.long))


@needs_export
def test_sizes_among_the_values_that_cross_are_known_as_such() -> None:
    stages = halves(Positions(fixed=False), (torch.ones(2, 5, dtype=torch.long),), {}, sources=["export"])
    crossing = dict(zip(stages[1].inputs, stages[0](torch.ones(2, 5, dtype=torch.long)), strict=True))
    assert stages[1].sizes == {name for name, value in crossing.items() if isinstance(value, int)} != set()


@pytest.mark.parametrize("value", [float("nan"), np.arange(3), None, "text", (1, 2)])
def test_a_constant_may_be_given_again_as_an_equal_one(value: Any) -> None:
    argument = Argument("x", required=False, default=value, constant=True)
    assert argument.values(pickle.loads(pickle.dumps(value))) == {}


@pytest.mark.parametrize(("value", "other"), [(float("nan"), 1.0), (np.arange(3), np.arange(4)), (np.ones(2), 1.0)])
def test_a_constant_may_not_be_given_as_another(value: Any, other: Any) -> None:
    argument = Argument("x", required=False, default=value, constant=True)
    with pytest.raises(PartitionError, match="which is a constant of the graph"):
        argument.values(other)
