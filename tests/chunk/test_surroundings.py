"""What programs do around a model in chunks: copies, interrupts, evaluation, and gradients that they keep."""

from __future__ import annotations

import copy
import gc
import io
import os
import signal
import threading
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it
from torch.optim.swa_utils import get_ema_avg_fn

from tests.chunk.plain import Chunked, Plain
from tests.chunk.small_model import ADAMW, CLASSES, STILL, X, chunked, loss_of, make, step
from tests.unit.fresh_process import run_python
from torch_lms.chunk.occupancy import Occupancy
from torch_lms.errors import ChunkError

# --- the model ---


@pytest.mark.parametrize("between", [False, True])
def test_copies_are_plain_models(between: bool) -> None:
    model, optimizer = chunked()
    step(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(model),
        torch.optim.swa_utils.AveragedModel(model).module,
        torch.load(file, weights_only=False),
    ]
    for other in copies:
        with torch.no_grad():
            assert torch.equal(other(X.bfloat16()), model(X))
        assert torch.equal(other.state_dict()["0.weight"], model[0].weight)
    if between:
        loss_of(model).backward()
        with pytest.raises(RuntimeError, match="its bytes hold its gradient now"):
            copy.deepcopy(model)
    step(model, optimizer)
    assert not torch.equal(copies[0][0].weight, model[0].weight)
    with pytest.raises(ChunkError, match="found it being copied or pickled"):
        copy.deepcopy(optimizer)


def test_an_average_in_32_bits_follows_the_masters() -> None:
    model, optimizer = chunked(optimize=partial(torch.optim.AdamW, lr=1e-4))
    average, narrow = (torch.optim.swa_utils.AveragedModel(model, avg_fn=get_ema_avg_fn(0.99)) for _ in range(2))
    average.float()
    first = expected = model.state_dict()["0.weight"].clone()
    for _ in range(100):
        step(model, optimizer)
        average.update_parameters(model)
        narrow.update_parameters(model)
        expected = expected.lerp(model.state_dict()["0.weight"], 0.01)
    off, narrow_off = ((one.module[0].weight - expected).norm() for one in (average, narrow))
    assert off < 0.5 * narrow_off
    assert off < 0.2 * (expected - first).norm()


def test_an_interrupt_in_a_forward_leaves_everything_usable() -> None:
    model, optimizer = chunked()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    handle.remove()
    optimizer.zero_grad()
    for _ in range(2):
        step(model, optimizer)


def test_an_interrupt_while_a_step_waits_for_the_processor_loses_no_update() -> None:
    class Waits(torch.optim.AdamW):
        caught: threading.Event | None = None

        def _init_group(self, *arguments: Any) -> Any:
            if Waits.caught is not None:
                time.sleep(0.2)  # until the step waits
                os.kill(os.getpid(), signal.SIGINT)
                Waits.caught.wait(60)
                Waits.caught = None
            return super()._init_group(*arguments)

    plain = Plain(make(), ADAMW)
    chunked = Chunked(make(), partial(Waits, lr=1e-2), update_on="host", chunk_numel=4096)
    for number in range(3):
        for training in (plain, chunked):
            training.zero_grad()
            F.cross_entropy(training.model(X.bfloat16()).float(), CLASSES).backward()
        plain.step()
        if number == 1:
            Waits.caught = caught = threading.Event()
            before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs in the background ignores it
            try:
                with pytest.raises(KeyboardInterrupt):
                    chunked.step()
            finally:
                signal.signal(signal.SIGINT, before)
            caught.set()
        chunked.step()
        for parameter, one in zip(plain.parameters, chunked.parameters, strict=True):
            assert torch.equal(parameter, one)


def test_backward_inside_of_a_forward() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                F.cross_entropy(self.linear(x).float(), CLASSES).backward()
            return self.linear(x)

    gradients = []
    for reuse in (True, False):
        torch.manual_seed(0)
        model, optimizer = chunked(Inner(), reuse_gradients=reuse)
        model(X)
        gradients.append(model.linear.weight.grad.clone())
        optimizer.step()
    assert torch.equal(*gradients)


def test_who_steps_while_a_module_runs_is_told() -> None:
    model, optimizer = chunked()
    loss_of(model).backward()
    running, done = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        running.set()
        done.wait(60)

    model[2].register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: model(X))
    thread.start()
    running.wait(60)
    loss = F.linear(X.bfloat16(), model[2].weight).float().sum()
    loss.backward()
    with pytest.raises(ChunkError, match="used by no module, found 1 that run"):
        optimizer.step()
    done.set()
    thread.join()
    optimizer.step()


@pytest.mark.parametrize("what", ["clip", "accumulate"])
def test_evaluating_in_inference_mode_between_backward_and_step(what: str) -> None:
    model, optimizer = chunked()
    loss_of(model).backward()
    with torch.inference_mode():
        model(X)
    if what == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    else:
        loss_of(model).backward()
    optimizer.step()


def test_what_the_model_is_called_with_stays_the_callers() -> None:
    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 8)

        def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
            seen.append(x)
            return self.linear(x)

    model, _ = chunked(Collects())
    seen: list[torch.Tensor] = []
    model(X, seen)
    assert [one.dtype for one in seen] == [torch.bfloat16]


def test_a_model_that_goes_takes_its_chunks_along() -> None:
    model, optimizer = chunked()
    step(model, optimizer)
    gone = weakref.ref(optimizer._data)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_kernels_that_get_a_parameter_without_bytes_raise() -> None:
    program = """
import torch, torch_lms
model = torch.nn.Linear(64, 64)
model, optimizer = torch_lms.chunked(model, torch.optim.AdamW(model.parameters()))
model(torch.rand(4, 64)).float().sum().backward()
p, x = model.weight, torch.ones(64, 64, dtype=torch.bfloat16)
with torch.no_grad():
    for ask in (lambda: x.add_(p), lambda: x.lerp_(p, 0.1), lambda: torch._foreach_add_([x], [p]), lambda: p.max(1),
                lambda: p.topk(2), lambda: p.nan_to_num(), lambda: p.cumsum(0), lambda: x.copy_(p), lambda: p.t() + 1):
        try:
            ask()
        except RuntimeError as error:
            print("its bytes hold its gradient now" in str(error) or "out of bounds" in str(error))
optimizer.step()
print(bool(p.isfinite().all()))
"""
    ended = run_python("-c", program)
    assert ended.stdout.split() == ["True"] * 10, ended.stderr[-2000:]


# --- gradients ---


def test_gradients_that_are_kept_keep_their_bytes() -> None:
    model, optimizer = chunked()
    for use_up in (optimizer.zero_grad, optimizer.step):
        loss_of(model).backward()
        kept = [one.grad for one in model.parameters()]
        copies = [one.clone() for one in kept]
        use_up()
        assert all(map(torch.equal, kept, copies))


def test_views_of_gradients_are_told_and_keep_their_bytes_from_then_on() -> None:
    model, optimizer = chunked(optimize=STILL)
    loss_of(model).backward()
    kept = [model[0].weight.grad[0], model[2].weight.grad.view(-1), model[4].weight.grad.detach()]
    with pytest.warns(UserWarning, match=r"a view of the gradient of [024].weight.*clone\(\)") as told:
        optimizer.step()
    assert len(told) == 3
    for use_up in (optimizer.step, optimizer.zero_grad):
        loss_of(model).backward()
        kept = [model[0].weight.grad[0], model[2].weight.grad.view(-1), model[4].weight.grad.detach()]
        copies = [one.clone() for one in kept]
        use_up()
        assert all(map(torch.equal, kept, copies))


def test_gradients_that_nobody_keeps_are_used_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = chunked(optimize=STILL)
    used = []
    find = Occupancy.gradient

    def noting(self: Occupancy, number: int) -> torch.Tensor:
        used.append((number, find(self, number).data_ptr()))
        return find(self, number)

    monkeypatch.setattr(Occupancy, "gradient", noting)
    loss_of(model).backward()
    optimizer.step()
    assert sorted(used) == [(number, view.data_ptr()) for number, view in enumerate(optimizer.data.views)]


def test_a_parameter_whose_gradient_is_dropped_has_bytes_after_the_step() -> None:
    model, optimizer = chunked()
    before = model[0].weight.detach().clone()
    loss_of(model).backward()
    model[0].weight.grad = None
    optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_what_a_failed_backward_has_brought_is_not_waited_for() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
            h = self.a(x)
            return self.b(h) + (self.c(h) if both else 0)

    model, optimizer = chunked(Two(), step_in_backward=True)
    for _ in range(2):
        step(model, optimizer)
    handle = model.a.register_forward_hook(lambda _, __, out: out.register_hook(lambda _: 1 / 0) and None)
    with pytest.raises(ZeroDivisionError):
        loss_of(model).backward()
    handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    F.cross_entropy(model(X, both=False).float(), CLASSES).backward()
    optimizer.step()
