"""Optimizers and clipping as users write them: PyTorch's own choice, in pieces where its tensors exceed the limit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad

import torch_lms
from tests.same_tensors import same_tensors
from tests.unit.markers import counts_exactly
from tests.unit.optimizer_kinds import OPTIMIZERS, ListLengths
from tests.unit.trainings import MIN_BYTES, one_thread
from torch_lms.swap import optimizers

WIDTH = 64
LAYERS = 12
MODEL_BYTES = LAYERS * (WIDTH + 1) * WIDTH * 4
TOO_SMALL_BYTES = MODEL_BYTES * 2
LARGE_BYTES = 1 << 30

Clip = Callable[[list[nn.Parameter]], Any]
CLIPS: dict[str, Clip] = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5),
    "infinite norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5, norm_type=float("inf")),
    "one norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5, norm_type=1.0),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def with_gradients(model: nn.Module, number: int = 0) -> list[nn.Parameter]:
    batch = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(number))
    model(batch).square().sum().backward()
    return list(model.parameters())


@one_thread()
def train(name: str, **choice: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Losses, gradients, parameters and state after some steps, and the lengths of the lists in them."""
    model = make_model()
    kind, arguments = OPTIMIZERS[name]
    optimizer = kind(model.parameters(), **arguments, **choice)
    lengths = ListLengths()
    for number in range(4):
        optimizer.zero_grad()
        with_gradients(model, number)
        with lengths:
            optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    state = [value for of_one in optimizer.state.values() for value in of_one.values() if torch.is_tensor(value)]
    return [*gradients, *model.parameters(), *state], lengths.seen


def within(limit_bytes: int) -> None:
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES)


def count_lists(parameters: list[nn.Parameter]) -> int:
    """How many pieces the norm of all gradients is taken of."""
    with ListLengths() as lengths:
        nn.utils.clip_grad_norm_(parameters, 1.0)
    return len(lengths.seen) // 2


@contextmanager
def cuda_default() -> Iterator[None]:
    """PyTorch chooses as it does on CUDA: the implementations for many tensors."""
    name = "_default_to_fused_or_foreach"
    with pytest.MonkeyPatch.context() as patch:
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torch.optim.") and hasattr(module, name):
                patch.setattr(module, name, lambda *args, **kwargs: (False, True))
        yield


# --- the same bits, in pieces -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_default_on_cuda_goes_in_pieces_and_is_bit_equal(name: str) -> None:
    with cuda_default():
        whole, whole_lengths = train(name)
        within(TOO_SMALL_BYTES)
        made, lengths = train(name)
    assert set(whole_lengths) == {2 * LAYERS}
    assert 0 < max(lengths) <= 4
    assert same_tensors(made, whole)


@pytest.mark.parametrize("fused", ["adam", "adamw", "sgd with momentum", "adagrad"])
def test_fused_optimizers_go_in_pieces_and_are_bit_equal(fused: str) -> None:
    whole, _ = train(fused, fused=True)
    within(TOO_SMALL_BYTES)
    made, lengths = train(fused, fused=True)
    assert 0 < max(lengths) <= 4
    assert same_tensors(made, whole)


@pytest.mark.parametrize("name", CLIPS)
def test_clipping_goes_in_pieces_and_is_bit_equal(name: str) -> None:
    def clipped() -> list[torch.Tensor]:
        parameters = with_gradients(make_model())
        with ListLengths() as lengths:
            made = CLIPS[name](parameters)
        seen.append(max(lengths.seen))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return gradients if made is None else [*gradients, made]

    seen: list[int] = []
    whole = clipped()
    within(MODEL_BYTES)
    assert same_tensors(clipped(), whole)
    assert seen[0] == 2 * LAYERS
    assert seen[1] <= 4


def test_several_dtypes_go_in_pieces_and_are_bit_equal() -> None:
    def norms() -> list[torch.Tensor]:
        torch.manual_seed(0)
        tensors = [torch.rand(WIDTH, WIDTH, dtype=(torch.float32, torch.bfloat16)[n % 2]) for n in range(LAYERS)]
        return [nn.utils.get_total_norm(tensors)]

    whole = norms()
    within(MODEL_BYTES // 2)
    assert same_tensors(norms(), whole)


@counts_exactly
def test_a_step_in_pieces_keeps_the_limit_and_moves_no_more_than_tensor_by_tensor() -> None:
    def paged_out_bytes(foreach: bool) -> int:
        within(TOO_SMALL_BYTES)
        torch_lms.stats(reset=True)
        train("adamw", foreach=foreach)
        stats = torch_lms.stats()
        torch_lms.disable()
        assert stats.peak_allocated_bytes <= TOO_SMALL_BYTES
        assert stats.host_served == 0
        return stats.pageout_bytes

    assert 0 < paged_out_bytes(foreach=True) <= 1.1 * paged_out_bytes(foreach=False)


# --- who chooses ------------------------------------------------------------------------------------------


def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The implementations of Adam that are called from now on."""
    adam = sys.modules["torch.optim.adam"]
    names: list[str] = []

    def watch(name: str) -> None:
        plain = getattr(adam, name)
        monkeypatch.setattr(adam, name, lambda *args, **kwargs: (names.append(name), plain(*args, **kwargs)))

    for name in ("_single_tensor_adam", "_multi_tensor_adam", "_fused_adam"):
        watch(name)
    return names


@pytest.mark.parametrize(
    ("choice", "implementation"),
    [
        ({}, "_single_tensor_adam"),  # the default on the CPU
        ({"foreach": False}, "_single_tensor_adam"),
        ({"foreach": True}, "_multi_tensor_adam"),
        ({"fused": True}, "_fused_adam"),
    ],
    ids=str,
)
def test_the_implementation_that_was_chosen_is_used(
    choice: dict[str, bool], implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = called(monkeypatch)
    within(TOO_SMALL_BYTES)
    train("adamw", **choice)
    assert set(names) == {implementation}


def test_a_limit_that_fits_all_leaves_one_list() -> None:
    within(LARGE_BYTES)
    _, lengths = train("adamw", foreach=True)
    assert set(lengths) == {2 * LAYERS}


def test_another_limit_takes_the_place_of_the_first() -> None:
    parameters = with_gradients(make_model())
    within(LARGE_BYTES)
    assert count_lists(parameters) == 1
    within(MODEL_BYTES)
    assert count_lists(parameters) > LAYERS // 2


def test_a_limit_of_another_device_leaves_one_list() -> None:
    optimizers.install({"cuda:0": MODEL_BYTES})
    try:
        assert count_lists(with_gradients(make_model())) == 1
    finally:
        optimizers.uninstall()


def test_off_gives_pytorch_back_what_was_its_own() -> None:
    name = "_group_tensors_by_device_and_dtype"
    before = vars(torch.optim.Optimizer)[name], vars(clip_grad)[name]
    for _ in range(2):
        within(MODEL_BYTES)
        assert vars(clip_grad)[name] is not before[1]
        torch_lms.disable()
        assert (vars(torch.optim.Optimizer)[name], vars(clip_grad)[name]) == before
    assert count_lists(with_gradients(make_model())) == 1


def test_what_somebody_else_put_around_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_group_tensors_by_device_and_dtype"
    monkeypatch.setattr(clip_grad, name, vars(clip_grad)[name])  # what it is again after the test
    within(MODEL_BYTES)
    ours = vars(clip_grad)[name]

    def theirs(*args: Any) -> Any:
        return ours(*args)

    monkeypatch.setattr(clip_grad, name, theirs)
    torch_lms.disable()
    assert vars(clip_grad)[name] is theirs
    assert count_lists(with_gradients(make_model())) == 1


def test_while_compiling_pytorch_has_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = with_gradients(make_model())
    within(MODEL_BYTES)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert count_lists(parameters) == 1


def test_a_compiled_clipping_is_bit_equal() -> None:
    def clipped(clip: Clip) -> list[torch.Tensor]:
        parameters = with_gradients(make_model())
        return [clip(parameters), *(parameter.grad for parameter in parameters if parameter.grad is not None)]

    whole = clipped(CLIPS["norm"])
    within(TOO_SMALL_BYTES)
    assert same_tensors(clipped(torch.compile(CLIPS["norm"], backend="eager", fullgraph=True)), whole)


def test_other_peoples_optimizers_are_given_everything_at_once() -> None:
    """They may combine the tensors of a group."""
    within(MODEL_BYTES)
    gradients = [parameter.grad for parameter in with_gradients(make_model())]
    assert len(torch.optim.Optimizer._group_tensors_by_device_and_dtype([gradients])) == 1


def test_steps_while_other_threads_turn_it_on_and_off_are_bit_equal() -> None:
    with cuda_default():
        whole, _ = train("adamw")
        made: list[list[torch.Tensor]] = []
        thread = threading.Thread(target=lambda: made.extend(train("adamw")[0] for _ in range(4)))
        thread.start()
        while thread.is_alive():
            optimizers.install({"cpu": TOO_SMALL_BYTES})
            optimizers.uninstall()
        thread.join()
    assert len(made) == 4
    assert all(same_tensors(one, whole) for one in made)


# --- what is left alone -----------------------------------------------------------------------------------


class Odd(torch.Tensor):
    """A subclass, as DTensor is one."""


def square(count: int = 3) -> list[torch.Tensor]:
    return [torch.rand(4, 6) for _ in range(count)]


def numbers(count: int = 3) -> list[torch.Tensor]:
    return [torch.rand(()) for _ in range(count)]


ALIKE: dict[str, list[list[torch.Tensor | None]]] = {
    "one list": [square()],
    "state and steps": [square(), square(), numbers()],
    "no list": [square(), square(), []],
    "no momentum yet": [square(), [None, None, None]],
    "transposed": [[tensor.t() for tensor in square()], [tensor.t() for tensor in square()]],
    "channels last": [
        [torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)],
        [torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    ],
    "strides of single rows": [[torch.rand(4, 1)], [torch.rand(1, 4).t()]],
    "state of another dtype": [square(), [tensor.bfloat16() for tensor in square()]],
    "parameters that are numbers": [[*square(1), *numbers(1)], [*square(1), *numbers(1)]],
    "empty": [[torch.rand(0, 5), torch.rand(4)]],
}
NOT_ALIKE: dict[str, list[list[torch.Tensor | None]]] = {
    "some without momentum": [square(), [None, *square(2)]],
    "a subclass": [[*square(1), torch.rand(4, 6).as_subclass(Odd)]],
    "sparse": [square(), [*square(2), torch.rand(4, 6).to_sparse()]],
    "one of another dtype": [square(), [*square(2), torch.rand(4, 6, dtype=torch.float64)]],
    "one on another device": [square(), [*square(2), torch.rand(4, 6, device="meta")]],
    "other strides": [square(), [*square(2), torch.rand(6, 4).t()]],
    "another shape": [square(), [*square(2), torch.rand(6, 4)]],
    "with gaps": [[*square(2), torch.rand(4, 7)[:, :6]]],
    "expanded": [[*square(2), torch.rand(6).expand(4, 6)]],
    "numbers among parameters, with numbers of each": [[*square(2), *numbers(1)], numbers()],
}


@pytest.mark.parametrize("name", ALIKE)
def test_tensors_that_are_alike_may_be_cut(name: str) -> None:
    assert optimizers._are_independent(ALIKE[name])


@pytest.mark.parametrize("name", NOT_ALIKE)
def test_tensors_that_are_not_alike_stay_together(name: str) -> None:
    assert not optimizers._are_independent(NOT_ALIKE[name])


def test_gradients_that_lie_otherwise_than_others_stay_together_in_training() -> None:
    parameters = with_gradients(make_model())
    parameters[0].grad = torch.rand(WIDTH, 2 * WIDTH)[:, ::2]
    within(MODEL_BYTES)
    assert count_lists(parameters) == 1


def test_sparse_gradients_are_bit_equal() -> None:
    @one_thread()
    def trained() -> list[torch.Tensor]:
        torch.manual_seed(0)
        tables = nn.ModuleList(nn.Embedding(64, WIDTH, sparse=True) for _ in range(LAYERS))
        optimizer = torch.optim.Adagrad(tables.parameters(), foreach=True)
        for number in range(3):
            optimizer.zero_grad()
            sum(table(torch.tensor([number, 7])).square().sum() for table in tables).backward()
            optimizer.step()
        return list(tables.parameters())

    whole = trained()
    within(TOO_SMALL_BYTES)
    assert same_tensors(trained(), whole)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(0, 1000))
def test_pieces_are_all_in_order_and_small_where_they_can_be(sizes: list[int], piece_bytes: int) -> None:
    lists = [[torch.empty(size) for size in sizes], [torch.empty(size) for size in sizes]]
    pieces = list(optimizers._pieces(lists, piece_bytes))
    assert [index for piece in pieces for index in range(len(sizes))[piece]] == list(range(len(sizes)))
    for piece in pieces:
        assert len(sizes[piece]) == 1 or optimizers._element_bytes(lists) * sum(sizes[piece]) <= piece_bytes
