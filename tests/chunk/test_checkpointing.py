"""State dicts of models in chunks are those of plain ones, and fill them."""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import torch_lms
from tests.chunk.plain import Chunked, Plain, loss_of, same, train
from tests.chunk.test_chunked import ADAMW, OPTIMIZERS, Owner, in_order, make
from tests.unit.trainings import GPT_TRAINING, TRAININGS, Training, one_thread, vector_batch
from torch_lms.chunk import ShardedState

STEPS = 3


def state_dicts(chunked: Chunked) -> tuple[dict[str, Any], dict[str, Any]]:
    """As they come from a file."""
    file = io.BytesIO()
    torch.save((chunked.model.state_dict(), chunked.optimizer.state_dict()), file)
    file.seek(0)
    loaded: tuple[dict[str, Any], dict[str, Any]] = torch.load(file)
    return loaded


def trained(training: Training, which: type[Plain] | type[Chunked], optimizer: str, **options: Any) -> Any:
    made = which(make(training), OPTIMIZERS[optimizer], **options)
    for _ in train(made, training.batch, STEPS):
        pass
    return made


@one_thread()
@pytest.mark.parametrize("training", TRAININGS, ids=lambda one: one.name)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD with momentum", "Adafactor"])
def test_state_dicts_are_those_of_masters_and_of_the_given_optimizer(training: Training, optimizer: str) -> None:
    plain, chunked = trained(training, Plain, optimizer), trained(training, Chunked, optimizer)
    model, state = state_dicts(chunked)
    names = [name for name, _ in plain.model.named_parameters()]
    for name, master in zip(names, plain.masters, strict=True):
        assert model[name].dtype == torch.float32
        assert torch.equal(model[name], master)
    assert list(model) == list(plain.model.state_dict())
    expected = plain.optimizer.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert list(state["state"]) == list(expected["state"])
    for number, values in expected["state"].items():
        assert list(state["state"][number]) == list(values)
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(state["state"][number][key]), torch.as_tensor(value)), key


@one_thread()
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD with momentum", "Adafactor"])
def test_a_training_goes_on_from_its_state_dicts_with_other_chunks(optimizer: str) -> None:
    through = Chunked(make(GPT_TRAINING), OPTIMIZERS[optimizer])
    steps = train(through, GPT_TRAINING.batch, 2 * STEPS)
    for _ in range(STEPS):
        next(steps)
    saved = state_dicts(through)
    torch.manual_seed(1)
    again = Chunked(GPT_TRAINING.make(), OPTIMIZERS[optimizer], chunk_numel=1 << 15)
    loss_of(again.model, GPT_TRAINING.batch(0)).backward()  # gradients in the places of parameters
    again.model.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    for number, made in enumerate(steps):
        torch.manual_seed(number + STEPS)  # dropout's
        again.zero_grad()
        loss = loss_of(again.model, GPT_TRAINING.batch(number + STEPS))
        loss.backward()
        gradients = [one.grad.clone() for one in again.parameters if one.grad is not None]
        again.step()
        assert same(made, [loss.detach(), *gradients, *(master.clone() for master in again.masters)])


@one_thread()
def test_a_plain_optimizer_that_has_stepped_goes_on_in_chunks() -> None:
    model = Owner(in_order)
    given = ADAMW(model.parameters())
    model(vector_batch(0)[0]).square().mean().backward()
    given.step()
    given.zero_grad()
    other = copy.deepcopy(model)
    plain = Plain(other, ADAMW)
    plain.optimizer.load_state_dict(copy.deepcopy(given.state_dict()))
    chunked = Chunked(model, lambda _: given)
    for expected, made in zip(train(plain, vector_batch, STEPS), train(chunked, vector_batch, STEPS), strict=True):
        assert same(made, expected)


@one_thread()
def test_a_plain_model_loads_what_one_in_chunks_has_saved_and_the_other_way() -> None:
    chunked = trained(GPT_TRAINING, Chunked, "AdamW")
    plain = GPT_TRAINING.make()
    plain.load_state_dict(chunked.model.state_dict())
    assert torch.equal(plain.head.weight, chunked.optimizer._data.master(0))
    with torch.no_grad():
        plain.head.weight.mul_(1.5)
    chunked.model.load_state_dict(plain.state_dict())
    assert torch.equal(chunked.model.head.weight, plain.head.weight.bfloat16())
    assert torch.equal(chunked.optimizer._data.master(0), plain.head.weight)


@one_thread()
def test_saving_between_backward_and_step_changes_nothing() -> None:
    plain, chunked = Plain(Owner(in_order), ADAMW), Chunked(Owner(in_order), ADAMW)
    for number in range(STEPS):
        for training in (plain, chunked):
            training.zero_grad()
            loss_of(training.model, vector_batch(number)).backward()
        saved = chunked.model.state_dict()
        for name, master in zip([name for name, _ in plain.model.named_parameters()], plain.masters, strict=True):
            assert torch.equal(saved[name], master)
        plain.step()
        chunked.step()


def test_parameters_are_not_exchanged_for_loaded_tensors() -> None:
    chunked = Chunked(nn.Linear(8, 8), ADAMW)
    with pytest.raises(torch_lms.errors.ChunkError, match="found assign=True"):
        chunked.model.load_state_dict(nn.Linear(8, 8).state_dict(), assign=True)


def test_state_dicts_have_tensors_of_their_own() -> None:
    """Tensors of one storage are taken for tied ones by what saves them."""
    model = Chunked(make(GPT_TRAINING), ADAMW).model
    state = model.state_dict()
    storages = [value.untyped_storage() for value in state.values()]
    tied = state["tokens.weight"].untyped_storage()._cdata
    assert state["head.weight"].untyped_storage()._cdata == tied
    assert len({storage._cdata for storage in storages}) == len(storages) - 1
    assert all(one.nbytes() == value.nbytes for one, value in zip(storages, state.values(), strict=True))
    before = state["tokens.weight"].clone()
    with torch.no_grad():
        model.get_parameter("tokens.weight").zero_()
    assert torch.equal(state["tokens.weight"], before)
    assert not model.state_dict()["tokens.weight"].any()


def mixed(optimize: Any) -> Any:
    """In chunks, with a layer that is not used at first."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.late = nn.Linear(32, 8), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor, late: bool) -> torch.Tensor:
            return self.first(x) + (self.late(x) if late else 0)

    torch.manual_seed(0)
    model = Net()
    return torch_lms.chunked(model, optimize(model.parameters()))


def train_mixed(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        x = torch.rand(4, 32, generator=torch.Generator().manual_seed(number))
        model(x, late=number > 1).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


WITH_DECAY = {
    "Adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "Rprop": partial(torch.optim.Rprop, lr=1e-2),
    "ASGD": partial(torch.optim.ASGD, lr=1e-2),
}


@pytest.mark.parametrize("optimizer", WITH_DECAY)
@pytest.mark.parametrize("saved_at", [0, 1])
def test_a_sharded_state_of_what_has_not_stepped_yet_changes_nothing(
    optimizer: str, saved_at: int, tmp_path: Path
) -> None:
    """Neither in the training that saves it nor in the one that loads it."""
    undisturbed, saving, loading = (mixed(WITH_DECAY[optimizer]) for _ in range(3))
    train_mixed(*undisturbed, range(4))
    train_mixed(*saving, range(saved_at))
    dcp.save({"training": ShardedState(*saving)}, checkpoint_id=tmp_path)
    train_mixed(*loading, range(4))  # so that there are states, which the checkpoint has not
    dcp.load({"training": ShardedState(*loading)}, checkpoint_id=tmp_path)
    assert "without_state" not in loading[1].param_groups[0]
    for model, stepped in (saving, loading):
        train_mixed(model, stepped, range(saved_at, 4))
        for name, value in undisturbed[0].state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name


def test_a_sharded_state_fills_a_model_without_bytes(tmp_path: Path) -> None:
    saved = mixed(ADAMW)
    train_mixed(*saved, range(3))
    dcp.save({"training": ShardedState(*saved)}, checkpoint_id=tmp_path)
    with torch.device("meta"):
        model = type(saved[0])()
    model, optimizer = torch_lms.chunked(model, ADAMW(model.parameters()), device="cpu")
    dcp.load({"training": ShardedState(model, optimizer)}, checkpoint_id=tmp_path)
    for one in (saved, (model, optimizer)):
        train_mixed(*one, range(3, 5))
    for name, value in saved[0].state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_state_dicts_as_torch_distributed_takes_them_change_nothing() -> None:
    """It makes a step of an optimizer whose `state` is empty."""
    undisturbed, asked = mixed(ADAMW), mixed(ADAMW)
    train_mixed(*undisturbed, range(4))
    train_mixed(*asked, range(2))
    state = get_optimizer_state_dict(*asked)
    assert state["state"]["first.weight"]["step"] == 2
    of_first = asked[1].state[asked[0].first.weight]
    assert torch.equal(of_first["exp_avg"], state["state"]["first.weight"]["exp_avg"])
    train_mixed(*asked, range(2, 4))
    for name, value in undisturbed[0].state_dict().items():
        assert torch.equal(value, asked[0].state_dict()[name]), name
