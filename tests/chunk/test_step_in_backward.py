"""Updates that are made during backward, as soon as a chunk's gradients are there."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch

import torch_lms
from tests.chunk.plain import Chunked, Made, Plain, loss_of, same, train
from tests.chunk.test_chunked import ADAMW, OPTIMIZERS, STEPS, Owner, in_order, make
from tests.unit.trainings import TRAININGS, Training, one_thread, vector_batch


@one_thread()
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD with momentum"])
@pytest.mark.parametrize("training", TRAININGS, ids=lambda one: one.name)
@pytest.mark.parametrize("update_on", ["device", "host", "stream"])
def test_steps_in_backward_are_bit_equal(training: Training, optimizer: str, update_on: str) -> None:
    def without_gradients(made: Made) -> Made:
        return [made[0], *made[len(made) - count :]]

    optimize = OPTIMIZERS[optimizer]
    plain = Plain(make(training), optimize)
    chunked = Chunked(make(training), optimize, step_in_backward=True, update_on=update_on)
    count = len(plain.masters)
    for expected, made in zip(train(plain, training.batch, STEPS), train(chunked, training.batch, STEPS), strict=True):
        assert same(made, without_gradients(expected))


class Slow(torch.optim.SGD):
    """Its updates take so long that others come in between."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        time.sleep(0.03)
        super().step()


def losses(threads: int) -> list[float]:
    """Of steps, each with calls of the model by other threads before it ends."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    options = {"update_on": "host", "step_in_backward": True, "chunk_numel": 4608}
    model, optimizer = torch_lms.chunked(model, Slow(model.parameters(), lr=0.1), **options)
    x, found = torch.rand(4, 64), []
    evaluate = torch.no_grad()(partial(model, x))
    for _ in range(4):
        loss = model(x).float().square().mean()
        loss.backward()
        found.append(loss.item())
        others = [threading.Thread(target=evaluate) for _ in range(threads)]
        for other in others:
            other.start()
        for other in others:
            other.join()
        optimizer.step()
    return found


@one_thread()
def test_threads_that_call_the_model_while_updates_are_under_way_change_nothing() -> None:
    assert losses(threads=3) == losses(threads=0)


@one_thread()
def test_parameters_are_right_while_updates_are_under_way() -> None:
    plain = Plain(Owner(in_order), ADAMW)
    chunked = Chunked(Owner(in_order), ADAMW, update_on="host", step_in_backward=True)
    for number in range(STEPS):
        for training in (plain, chunked):
            loss_of(training.model, vector_batch(number)).backward()
        plain.step()
        plain.zero_grad()
        if number != 0:  # the first step finds out what a chunk is to wait for
            with torch.no_grad():
                losses = [loss_of(training.model, vector_batch(9)) for training in (plain, chunked)]
            assert torch.equal(*losses)
            assert chunked.optimizer.state_dict()["state"].keys() == plain.optimizer.state_dict()["state"].keys()
        chunked.step()


@one_thread()
@pytest.mark.parametrize("update_on", ["device", "host", "stream"])
def test_a_second_backward_without_a_step_is_refused_where_backward_steps(update_on: str) -> None:
    chunked = Chunked(Owner(in_order), ADAMW, step_in_backward=True, update_on=update_on)
    for _ in range(2):  # the first finds out which parameters get gradients
        loss_of(chunked.model, vector_batch(0)).backward()
        chunked.step()
    loss_of(chunked.model, vector_batch(0)).backward()
    chunked.optimizer.settle()
    before = [master.clone() for master in chunked.masters]
    with pytest.raises(torch_lms.errors.ChunkError, match="after each backward, found another gradient"):
        loss_of(chunked.model, vector_batch(1)).backward()
    assert all(map(torch.equal, before, chunked.masters))
    chunked.step()
    loss_of(chunked.model, vector_batch(1)).backward()
    chunked.step()


@one_thread()
@pytest.mark.parametrize("update_on", ["device", "host", "stream"])
def test_training_goes_on_after_a_backward_that_has_failed(update_on: str) -> None:
    chunked = Chunked(Owner(in_order), ADAMW, step_in_backward=True, update_on=update_on, chunk_numel=1 << 18)
    for number in range(6):
        chunked.zero_grad()
        if number == 3:  # when later parts have been updated
            handle = chunked.model.parts[1].register_full_backward_hook(fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                loss_of(chunked.model, vector_batch(number)).backward()
            handle.remove()
            continue
        before = chunked.model.state_dict()
        loss_of(chunked.model, vector_batch(number)).backward()
        chunked.step()
        after = chunked.model.state_dict()
        assert not any(torch.equal(after[name], before[name]) for name in after if name.startswith("parts"))
    for master, parameter in zip(chunked.masters, chunked.parameters, strict=True):
        assert master is not None
        assert torch.equal(parameter, master.to(parameter.dtype))


def fail(*_: object) -> None:
    raise RuntimeError("on purpose")


@one_thread()
def test_gradients_that_backward_has_used_up_are_not_clipped() -> None:
    chunked = Chunked(Owner(in_order), ADAMW, step_in_backward=True)
    for _ in range(2):
        loss_of(chunked.model, vector_batch(0)).backward()
        with pytest.raises(torch_lms.errors.ChunkError, match=r"expected gradients, found .* updated already"):
            chunked.optimizer.clip_grad_norm_(1.0)
        chunked.step()
