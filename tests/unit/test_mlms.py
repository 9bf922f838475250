"""The MLMS manual's interface: attached on request, its flow from end to end, its order kept; IBM LMS's names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import torch_lms
from tests.unit.error_messages import raises_saying
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from torch_lms.errors import EnvError, LimitError, LmsError
from torch_lms.swap import mlms, state

TENSOR_NAMES = ["pageout_manual", "need_prefetch", "need_prefech"]
CUDA_NAMES = ["create_swap_env", "prefetch_init", "before_prefetch_wait_all", "prefetch_all", "close_swap_env"]
IBM_NAMES = [f"{verb}_{what}_lms" for verb in ("set", "get") for what in ("enabled", "limit", "size")]
EVERY_NAME = [(torch.Tensor, name) for name in TENSOR_NAMES] + [(torch.cuda, name) for name in CUDA_NAMES + IBM_NAMES]


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The names, for one test; and IBM LMS's settings as they were."""
    monkeypatch.setattr(mlms, "_lms_limit", mlms._lms_limit)
    monkeypatch.setattr(mlms, "_lms_size_bytes", mlms._lms_size_bytes)
    new = [(owner, name) for owner, name in EVERY_NAME if not hasattr(owner, name)]
    mlms.attach()
    yield
    for owner, name in new:
        delattr(owner, name)


pytestmark = pytest.mark.usefixtures("attached")


# --- attach --------------------------------------------------------------------------------------------


def attached_names() -> list[str]:
    return [name for owner, name in EVERY_NAME if hasattr(owner, name)]


def names_before_and_after_attach() -> tuple[list[str], list[str]]:
    torch_lms.pageout(torch.rand(3))
    with torch_lms.SwapEnv():
        before = attached_names()
    mlms.attach()
    return before, attached_names()


def test_only_attach_adds_names_to_pytorch() -> None:
    before, after = in_fresh_process(names_before_and_after_attach)
    assert before == []
    assert after == [name for _, name in EVERY_NAME]


def test_attach_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "create_swap_env", len)
    monkeypatch.setattr(torch.Tensor, "pageout_manual", len)
    mlms.attach()
    assert torch.cuda.create_swap_env is len  # type: ignore[attr-defined]
    assert torch.Tensor.pageout_manual is len  # type: ignore[attr-defined]


def test_the_manuals_spelling_is_the_same_function() -> None:
    assert torch.Tensor.need_prefech is torch.Tensor.need_prefetch  # type: ignore[attr-defined]


# --- the manual's flow on a model -------------------------------------------------------------------------------


class ConvNet(torch.nn.Module):
    """Shows each feature map to a function as soon as the next layer has used it."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 8, 8, 16, 16]
        self.convolutions = torch.nn.ModuleList(
            torch.nn.Conv2d(before, after, 3, padding=1) for before, after in itertools.pairwise(widths)
        )
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(width) for width in widths[1:])
        self.head = torch.nn.Linear(widths[-1], 10)

    def forward(self, x: torch.Tensor, used: Callable[[torch.Tensor], None]) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            hidden = convolution(x)
            used(x)
            x = torch.relu(norm(hidden))
            used(hidden)
        return self.head(x.mean((2, 3)))


def train(steps: int, step: Callable[[ConvNet, torch.Tensor, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Losses, then gradients, parameters and buffers."""
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(step(model, torch.rand(4, 3, 16, 16), torch.randint(10, (4,))))
        optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*losses, *gradients, *model.state_dict().values()]


def plain_step(model: ConvNet, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(model(images, lambda used: None), labels)
    loss.backward()
    return loss.detach()


def step_of_the_manual(model: ConvNet, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    cuda: Any = torch.cuda
    cuda.create_swap_env()
    maps: list[Any] = []

    def page_out(used: Any) -> None:
        used.pageout_manual()
        maps.append(used)

    loss = torch.nn.functional.cross_entropy(model(images, page_out), labels)
    cuda.before_prefetch_wait_all()
    cuda.prefetch_init()
    for used in reversed(maps):
        used.need_prefech()
    cuda.prefetch_all()
    loss.backward()
    cuda.close_swap_env()
    return loss.detach()


def test_training_by_the_manual_is_bit_equal(paged: ModuleType) -> None:
    plain = train(3, plain_step)
    manual = train(3, step_of_the_manual)
    assert len(manual) == len(plain) > 3
    assert all(torch.equal(mine, other) for mine, other in zip(manual, plain, strict=True))
    stats = paged.stats()
    assert stats.pageouts > 0
    assert stats.pageins > 0


# --- function by function ------------------------------------------------------------------------------------------


def paged_out_pair() -> tuple[Any, Any]:
    """Two tensors, out, in an open environment."""
    first, second = torch.rand(1000), torch.rand(1000)
    mlms.create_swap_env()
    mlms.pageout_manual(first)
    mlms.pageout_manual(second)
    mlms.before_prefetch_wait_all()
    return first, second


@counts_exactly
def test_before_prefetch_wait_all_waits_until_everything_is_out() -> None:
    tensors = paged_out_pair()
    assert [state(tensor) for tensor in tensors] == ["paged_out"] * 2


@counts_exactly
def test_need_prefetch_waits_for_prefetch_all(paged: ModuleType) -> None:
    first, second = paged_out_pair()
    mlms.prefetch_init()
    first.need_prefetch()
    second.need_prefech()
    assert [state(first), state(second)] == ["in_queued"] * 2
    mlms.prefetch_all()
    paged.wait()
    assert [state(first), state(second)] == ["resident"] * 2
    assert paged.stats().prefetches == paged.stats().prefetch_hits == 2


@counts_exactly
def test_a_use_does_not_wait_for_prefetch_all(paged: ModuleType) -> None:
    first, second = paged_out_pair()
    mlms.prefetch_init()
    first.need_prefetch()
    second.need_prefetch()
    second.sum()
    assert [state(first), state(second)] == ["in_queued", "resident"]
    assert paged.stats().passive_pageins == 1
    mlms.prefetch_all()
    mlms.close_swap_env()
    assert [state(first), state(second)] == ["resident"] * 2


@counts_exactly
def test_a_page_out_takes_back_a_prefetch_that_waits() -> None:
    first, second = paged_out_pair()
    mlms.prefetch_init()
    first.need_prefetch()
    first.pageout_manual()
    assert state(first) == "paged_out"
    second.need_prefetch()
    mlms.prefetch_all()
    torch_lms.wait()
    assert [state(first), state(second)] == ["paged_out", "resident"]


@counts_exactly
def test_close_pages_in_what_was_never_prefetched() -> None:
    first, second = paged_out_pair()
    mlms.prefetch_init()
    first.need_prefetch()
    mlms.close_swap_env()
    assert [state(first), state(second)] == ["resident"] * 2


@counts_exactly
def test_need_prefetch_of_what_is_resident_has_no_effect(paged: ModuleType) -> None:
    first, _ = paged_out_pair()
    first.sum()
    mlms.prefetch_init()
    first.need_prefetch()
    assert state(first) == "resident"
    assert paged.stats().prefetches == 0


def test_prefetches_without_prefetch_init_come_with_prefetch_all() -> None:
    first, second = paged_out_pair()
    copies = [first.clone(), second.clone()]
    first.pageout_manual()
    mlms.before_prefetch_wait_all()
    first.need_prefetch()
    mlms.prefetch_all()
    mlms.close_swap_env()
    assert torch.equal(first, copies[0])
    assert torch.equal(second, copies[1])


def test_waiting_for_prefetches_that_have_not_been_started_is_refused() -> None:
    first, _ = paged_out_pair()
    mlms.prefetch_init()
    first.need_prefetch()
    if state(first) != "in_queued":
        pytest.skip("chaos has brought it in")
    with raises_saying(LmsError, found="no worker", do="torch.cuda.prefetch_all"):
        torch_lms.wait()
    mlms.prefetch_all()
    torch_lms.wait()


def test_the_environment_can_be_created_again() -> None:
    tensor: Any = torch.rand(1000)
    copy = tensor.clone()
    for _ in range(3):
        mlms.create_swap_env()
        tensor.pageout_manual()
        mlms.close_swap_env()
        assert state(tensor) == "resident"
    assert torch.equal(tensor, copy)


# --- wrong order ---------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: getattr(torch.rand(3), name)() for name in TENSOR_NAMES},  # type: ignore[misc]
    **{name: lambda name=name: getattr(torch.cuda, name)() for name in CUDA_NAMES[1:]},  # type: ignore[misc]
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("closed_before", [False, True])
def test_nothing_works_without_an_environment(call: str, closed_before: bool) -> None:
    if closed_before:
        mlms.create_swap_env()
        mlms.close_swap_env()
    with raises_saying(EnvError, found="found none", do="torch.cuda.create_swap_env()"):
        CALLS[call]()


def test_a_second_environment_is_refused_and_the_first_stays_open() -> None:
    mlms.create_swap_env()
    with raises_saying(EnvError, found="found one", do="torch.cuda.close_swap_env() first"):
        mlms.create_swap_env()
    mlms.close_swap_env()


def test_what_cannot_go_out_is_refused_and_the_environment_stays_open() -> None:
    mlms.create_swap_env()
    with pytest.raises(torch_lms.errors.PageoutError):
        mlms.pageout_manual(torch.rand(3, device="meta"))
    mlms.close_swap_env()


# --- the names of IBM LMS --------------------------------------------------------------------------------------------

ibm: Any = torch.cuda


def test_ibm_names_turn_automatic_mode_on_and_off() -> None:
    assert ibm.get_enabled_lms() is False
    ibm.set_limit_lms({"cpu": "1GiB"})
    ibm.set_size_lms(4096)
    ibm.set_enabled_lms(True)
    assert ibm.get_enabled_lms() is True
    assert torch_lms.swap.is_enabled()
    assert torch_lms.stats().limit_bytes == 2**30
    ibm.set_enabled_lms(False)
    assert ibm.get_enabled_lms() is False
    assert torch_lms.stats().limit_bytes == 0


def test_ibm_settings_are_remembered() -> None:
    assert ibm.get_limit_lms() is None
    assert ibm.get_size_lms() == 2**20
    ibm.set_limit_lms({"cpu": 2**30})
    ibm.set_size_lms("2MiB")
    assert ibm.get_limit_lms() == {"cpu": 2**30}
    assert ibm.get_size_lms() == "2MiB"
    assert not torch_lms.swap.is_enabled()


def test_a_new_ibm_limit_holds_at_once() -> None:
    ibm.set_limit_lms({"cpu": "1GiB"})
    ibm.set_enabled_lms(True)
    ibm.set_limit_lms({"cpu": "2GiB"})
    assert torch_lms.stats().limit_bytes == 2**31


def tracked_storages_with_a_new_size() -> list[int]:
    mlms.attach()
    ibm.set_limit_lms({"cpu": "1GiB"})
    ibm.set_enabled_lms(True)
    small = torch.rand(2000)
    found = [torch_lms.stats().tracked_storages]
    ibm.set_size_lms(1000)
    small.add_(1)
    found.append(torch_lms.stats().tracked_storages)
    ibm.set_enabled_lms(False)
    return found


@counts_exactly
def test_a_new_ibm_size_holds_at_once() -> None:
    assert in_fresh_process(tracked_storages_with_a_new_size) == [0, 1]


def test_a_wrong_ibm_limit_is_refused_at_once() -> None:
    before = ibm.get_limit_lms()
    with pytest.raises(LimitError):
        ibm.set_limit_lms("lots")
    assert ibm.get_limit_lms() == before
    assert ibm.get_enabled_lms() is False


def test_a_wrong_ibm_limit_leaves_the_one_that_holds() -> None:
    ibm.set_limit_lms({"cpu": "1GiB"})
    ibm.set_enabled_lms(True)
    with pytest.raises(LimitError):
        ibm.set_limit_lms("lots")
    assert ibm.get_limit_lms() == {"cpu": "1GiB"}
