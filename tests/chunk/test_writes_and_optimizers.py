"""What programs write to parameters in chunks, and optimizers of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it
from torch.nn.utils import prune
from torch.optim.optimizer import register_optimizer_step_post_hook

import torch_lms
from tests.chunk.plain import Chunked, Plain, same, train
from tests.chunk.small_model import ADAMW, CLASSES, STILL, X, batch, chunked, loss_of, make, step
from torch_lms.errors import ChunkError

# --- what the program writes to parameters ---


@pytest.mark.parametrize("then", ["step", "call", "zero_grad"])
def test_data_assigned_between_backward_and_step_stays(then: str) -> None:
    model, optimizer = chunked(optimize=STILL)
    loss_of(model).backward()
    model[0].weight.data = torch.full((64, 64), 3.0, dtype=torch.bfloat16)
    {"step": optimizer.step, "call": lambda: model(X), "zero_grad": optimizer.zero_grad}[then]()
    assert (model[0].weight == 3).all()
    optimizer.step()
    assert (model.state_dict()["0.weight"] == 3).all()


def test_a_model_in_other_types_is_refused_at_its_next_call() -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(8, 64), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.embedding(x))

    model, optimizer = chunked(Embeds())
    before = model.state_dict()
    for change in (model.float, model.half, model.double):
        change()
        with pytest.raises(ChunkError, match=r"embedding.weight to be torch.bfloat16.*call model.to\(torch.bfloat16\)"):
            model(CLASSES)
        model.to(torch.bfloat16)
        model(CLASSES).float().sum().backward()
        optimizer.zero_grad()
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_write_that_changes_nothing_leaves_the_masters_bits() -> None:
    results = []
    for clamp in (False, True):
        model = nn.Linear(64, 8, bias=False)
        nn.init.ones_(model.weight)
        model, optimizer = chunked(model, partial(torch.optim.SGD, lr=1e-4))
        for _ in range(50):
            optimizer.zero_grad()
            model(torch.ones(1, 64)).float().sum().backward()
            optimizer.step()
            if clamp:
                with torch.no_grad():
                    model.weight.clamp_(-2, 2)
        results.append(model.state_dict()["weight"].clone())
    assert torch.equal(*results)
    assert (results[0] < 0.996).all()


def test_masters_take_what_is_loaded_under_other_names_and_keep_what_is_not() -> None:
    model = make()
    model[2].register_load_state_dict_pre_hook(
        lambda _, state, prefix, *__: state.update({prefix + "weight": state.pop(prefix + "kernel")})
    )
    model, optimizer = chunked(model, STILL)
    nn.init.ones_(model[4].weight)
    saved = {key: value for key, value in make().state_dict().items() if not key.startswith("4")}
    saved["2.kernel"] = torch.full_like(saved.pop("2.weight"), 1 + 2.0**-20)
    model.load_state_dict(saved, strict=False)
    step(model, optimizer)
    assert (model.state_dict()["2.weight"] == 1 + 2.0**-20).all()
    assert (model.state_dict()["4.weight"] == 1).all()


def test_state_dicts_follow_surgery() -> None:
    model, optimizer = chunked()
    model[4] = nn.Linear(64, 8, dtype=torch.bfloat16)
    assert torch.equal(model.state_dict()["4.weight"], model[4].weight)
    model, optimizer = chunked(optimize=STILL)
    prune.identity(model[2], "weight")
    saved = model.state_dict()
    assert saved["2.weight_orig"].dtype == torch.float32
    saved["2.weight_orig"] = torch.full((64, 64), 1 + 2.0**-20)
    model.load_state_dict(saved)
    step(model, optimizer)
    assert (model.state_dict()["2.weight_orig"] == 1 + 2.0**-20).all()


def test_a_modules_state_dict_has_masters_too() -> None:
    model, _ = chunked()
    given = nn.Linear(64, 64).state_dict()
    loss_of(model).backward()
    model[2].load_state_dict(given)
    assert torch.equal(model[2].state_dict()["weight"], given["weight"])
    assert torch.equal(model.state_dict()["2.weight"], given["weight"])


# --- optimizers ---


def test_frozen_parameters_in_the_optimizer_stay_as_they_are() -> None:
    model = make()
    model[0].requires_grad_(False)
    model, optimizer = chunked(model)
    before = model[0].weight.clone()
    for _ in range(2):
        step(model, optimizer)
    assert torch.equal(before, model[0].weight)
    optimizer.load_state_dict(optimizer.state_dict())
    model[0].requires_grad_(True)
    loss_of(model).backward()
    with pytest.raises(ChunkError, match=r"0.weight to stay frozen"):
        optimizer.step()


def test_hooks_of_steps_and_of_state_dicts_run_once() -> None:
    model, optimizer = chunked(chunk_numel=4096)
    called: list[str] = []
    everywhere = register_optimizer_step_post_hook(lambda *_: called.append("everywhere"))
    optimizer.register_step_post_hook(lambda *_: called.append("step"))
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("load"))
    step(model, optimizer)
    everywhere.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    assert sorted(called) == ["everywhere", "load", "step"]


def test_what_an_optimizer_counts_in_a_group_it_counts_once() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["in_place"] += 1
                group["anew"] = group["anew"] + 1
            return super().step(closure)

    model = make()
    groups = [
        {"params": list(model.parameters()), "in_place": torch.zeros(()), "anew": 0},
        {"params": [], "in_place": torch.zeros(()), "anew": 0},
    ]
    model, optimizer = torch_lms.chunked(model, Counting(groups, lr=0.1), chunk_numel=4096)
    for _ in range(3):
        step(model, optimizer)
    assert (optimizer.param_groups[0]["in_place"], optimizer.param_groups[0]["anew"]) == (3, 3)
    optimizer.load_state_dict(optimizer.state_dict())


class CountingItself(torch.optim.Optimizer):
    """Keeps its count of steps in itself, once as a number and once as a tensor, and learns less from step to step."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.steps = 0
        self.in_place = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        self.in_place += 1
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad * (group["lr"] / (self.steps + float(self.in_place))))


@pytest.mark.parametrize("update_on", ["device", "host", "stream"])
def test_what_an_optimizer_counts_in_itself_it_counts_once(update_on: str) -> None:
    plain = Plain(make(), CountingItself)
    chunked = Chunked(make(), CountingItself, update_on=update_on, chunk_numel=4096)
    assert chunked.optimizer.data.layout.chunks > 1
    for expected, found in zip(train(plain, batch, 3), train(chunked, batch, 3), strict=True):
        assert same(expected, found)


@pytest.mark.parametrize("step_in_backward", [False, True])
def test_rates_that_are_set_between_backward_and_step_stay(step_in_backward: bool) -> None:
    model, optimizer = chunked(step_in_backward=step_in_backward)
    for rate in (0.5, 0.25, 0.125):
        loss_of(model).backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == rate


def test_the_state_of_a_16_bit_model_becomes_its_masters() -> None:
    model = make().bfloat16()
    given = ADAMW(model.parameters())
    F.cross_entropy(model(X.bfloat16()).float(), CLASSES).backward()
    given.step()
    given.zero_grad()
    model, optimizer = torch_lms.chunked(model, given)
    step(model, optimizer)
    assert {one["exp_avg"].dtype for one in optimizer.state_dict()["state"].values()} == {torch.float32}


class Scaling(torch.optim.SGD):
    """Scales gradients by the norm of all of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.norm() for one in gradients]).norm()
        for one in gradients:
            one.div_(norm)
        return super().step(closure)


def test_an_optimizer_whose_updates_depend_on_one_another_is_refused() -> None:
    model = make()
    with pytest.raises(ChunkError, match="treats each parameter alone, found Scaling, whose update"):
        chunked(model, partial(Scaling, lr=0.1))
    assert model[0].weight.dtype == torch.float32


def wide_only(optimize: Any) -> Any:
    """Of a class: one whose steps fail on what has fewer rows than the model's parameters."""

    class WideOnly(optimize):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            if any(len(one) < 8 for group in self.param_groups for one in group["params"]):
                raise ValueError("expected 8 rows")
            return super().step(closure)

    return partial(WideOnly, lr=0.1)


def test_an_optimizer_that_fails_on_small_matrices_is_tried_on_shapes_of_its_own(
    recwarn: pytest.WarningsRecorder,
) -> None:
    with pytest.raises(ChunkError, match="treats each parameter alone, found WideOnly, whose update"):
        chunked(make(), wide_only(Scaling))
    step(*chunked(make(), wide_only(torch.optim.SGD)))
    assert not recwarn.list


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "no closure"
        return super().step(closure)


def test_of_an_optimizer_that_cannot_be_tried_a_warning_says_so() -> None:
    with pytest.warns(UserWarning, match="a step of NeedsClosure raises AssertionError: no closure"):
        chunked(make(), partial(NeedsClosure, lr=0.1))


def test_what_is_in_chunks_or_compiled_is_refused() -> None:
    def refused(text: str, model: nn.Module, optimize: Callable[..., Any] = ADAMW, **options: Any) -> None:
        types = [one.dtype for one in model.parameters()]
        with pytest.raises(ChunkError, match=text):
            chunked(model, optimize, **options)
        assert types == [one.dtype for one in model.parameters()]

    model, _ = chunked()
    refused("in no chunks yet, found 0.weight", model)
    other = make()
    other[2].weight = model[2].weight
    refused("in no chunks yet, found 2.weight", other)
    scripted = make()
    scripted[2] = torch.jit.script(scripted[2])
    refused("found 2, a RecursiveScriptModule", scripted)
    refused("found the model, a OptimizedModule", torch.compile(make(), backend="eager"))
    refused("expected step_in_backward with torch.bfloat16", make(), dtype=torch.float16, step_in_backward=True)
    chunked(nn.Linear(0, 0, bias=False))
