"""Automatic mode of torch_lms on the fork: a limit, and what no op has used for longest goes out.

Runs as ``test_fork_python_layer.py`` does. See Note [A limit in the fork] in ``SwapLimit.cpp``.
"""

from __future__ import annotations

import copy
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fork.lean_profile import in_full_builds
from tests.fork.python_layer import DEVICES, device, run_python, settled, swap, torch, torch_lms
from torch_lms import errors

__all__ = ["device", "settled"]  # fixtures

MIB = 1 << 20
WIDTH, ROWS = 256, 512  # a parameter of 256 KiB, an activation of 512 KiB


@pytest.fixture(autouse=True)
def unlimited(settled: None) -> Iterator[None]:
    yield
    torch_lms.disable()
    swap.mlms.set_limit_lms(None)
    swap.mlms.set_size_lms(MIB)


def limit(device: str, nbytes: int = 4 * MIB, min_bytes: int = 64 << 10) -> None:
    """More than what is allocated already, which may be of other tests."""
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    torch_lms.enable({device: held + nbytes}, min_bytes=min_bytes)


def block(device: str, dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Dropout(dropout)]
    return torch.nn.Sequential(*(copy.deepcopy(torch.nn.Sequential(*layers)) for _ in range(8))).to(device)


def inputs(device: str) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


def train(device: str, dropout: float = 0.0, steps: int = 3) -> list[torch.Tensor]:
    """Losses, then parameters."""
    model = block(device, dropout)
    optimizer = torch.optim.Adam(model.parameters())
    x = inputs(device)
    torch.manual_seed(2)
    losses = []
    for _ in range(steps):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [each.cpu() for each in (*losses, *model.parameters())]


def double_backward(device: str) -> list[torch.Tensor]:
    model, x = block(device), inputs(device).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def views_and_in_place(device: str) -> list[torch.Tensor]:
    results = []
    base = inputs(device)
    parts = base.chunk(8)
    for turn in range(8):
        others = [torch.full_like(base, index) for index in range(10)]
        parts[turn].mul_(turn + 1)
        base.t()[turn].add_(others[turn][0, 0])
        results.append(torch.stack([each.sum() for each in others]).sum() + base.sum())
    return [each.cpu() for each in (*results, base)]


def lists_of_tensors(device: str) -> list[torch.Tensor]:
    many = [inputs(device) + index for index in range(12)]
    whole = torch.cat(many)
    torch._foreach_add_(many, 1.0)
    return [whole.cpu(), torch.stack(many).cpu()]


def filled_through_its_address(device: str) -> list[torch.Tensor]:
    rows = [torch.full((32768,), float(index), device=device) for index in range(60)]
    elements = [rows[index % 60][index] for index in range(20_000)]
    return [torch.tensor(elements), rows[0][[element.long() for element in elements]].cpu()]


def lstm(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    network = torch.nn.LSTM(WIDTH, WIDTH, num_layers=2).to(device)
    with in_full_builds():
        result, _ = network(inputs(device).view(32, 16, WIDTH))
    result.square().sum().backward()
    return [result.detach().cpu(), *(parameter.grad.cpu() for parameter in network.parameters())]


PROGRAMS: dict[str, Callable[[str], list[torch.Tensor]]] = {
    "training": train,
    "dropout": lambda device: train(device, dropout=0.2),
    "double backward": double_backward,
    "views and in-place ops": views_and_in_place,
    "lists of tensors": lists_of_tensors,
    "filled through its address": filled_through_its_address,
    "lstm": lstm,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_limited_program_gives_the_same_bits(device: str, name: str) -> None:
    plain = PROGRAMS[name](device)
    gc.collect()
    limit(device)
    limited = PROGRAMS[name](device)
    stats = torch_lms.stats()
    assert stats.pageouts > 0
    assert stats.pageins > 0
    assert all(map(torch.equal, plain, limited)), name


def test_the_limit_is_kept(device: str) -> None:
    train(device)
    gc.collect()
    limit(device, 7 * MIB)
    train(device)
    stats = torch_lms.stats(reset=True)
    assert stats.pageouts > 0
    torch_lms.stats(reset=True)
    train(device)  # the growth of each op is known by now
    stats = torch_lms.stats()
    assert stats.limit_exceeded == 0
    if device == "cuda":
        assert (
            stats.peak_allocated_bytes <= stats.limit_bytes + 2 * MIB
        )  # matrix products allocate inside of themselves


def test_what_fits_does_not_move(device: str) -> None:
    limit(device, 256 * MIB)
    train(device)
    assert torch_lms.stats().pageouts == 0


def test_small_storages_stay(device: str) -> None:
    limit(device, MIB, min_bytes=MIB)
    train(device)
    assert torch_lms.stats().pageouts == 0


def test_the_least_recently_used_goes_first(device: str) -> None:
    limit(device, 4 * MIB)
    tensors = [torch.zeros(MIB // 4, device=device) for _ in range(3)]
    tensors[0].add_(1)
    more = torch.zeros(MIB // 4, device=device) + torch.zeros(MIB // 4, device=device)
    torch_lms.wait()
    assert swap.state(tensors[1]) == "paged_out"
    assert swap.state(more) == "resident"
    assert [float(tensor.sum()) for tensor in tensors] == [MIB // 4, 0.0, 0.0]


def test_ibms_names_turn_it_on(device: str) -> None:
    swap.mlms.attach()
    if device == "cpu":
        pytest.skip("IBM's limit is that of CUDA devices where there are any")
    torch.cuda.set_size_lms("64KiB")
    torch.cuda.set_limit_lms(torch.cuda.memory_allocated() + 4 * MIB)
    torch.cuda.set_enabled_lms(True)
    assert torch.cuda.get_enabled_lms()
    train(device)
    assert torch_lms.stats().pageouts > 0
    torch.cuda.set_enabled_lms(False)
    assert not torch.cuda.get_enabled_lms()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a bare limit is that of the CPU where there is no GPU")
def test_ibms_names_turn_it_on_where_there_is_no_gpu() -> None:
    swap.mlms.attach()
    torch.cuda.set_size_lms("64KiB")
    torch.cuda.set_limit_lms("4MiB")
    torch.cuda.set_enabled_lms(True)
    train("cpu")
    assert torch_lms.stats().pageouts > 0
    torch.cuda.set_limit_lms("512MiB")
    torch_lms.stats(reset=True)
    train("cpu")
    assert torch_lms.stats().pageouts == 0
    torch.cuda.set_enabled_lms(False)
    assert torch_lms.stats().limit_bytes == 0


def test_disable_brings_everything_back_and_ends_the_observation(device: str) -> None:
    limit(device)
    kept = [inputs(device) + index for index in range(16)]
    assert torch_lms.stats().pageouts > 0
    torch_lms.disable()
    assert [swap.state(each) for each in kept] == ["resident"] * 16
    torch_lms.stats(reset=True)
    train(device)
    assert torch_lms.stats().pageouts == 0
    assert all(torch.equal(each, inputs(device) + index) for index, each in enumerate(kept))


def test_threads_share_a_limit(device: str) -> None:
    plain = next(train(device) for _ in range(2))
    limit(device, 6 * MIB)
    results: dict[int, Any] = {}

    def work(index: int) -> None:
        try:
            results[index] = lists_of_tensors(device) if index % 2 else views_and_in_place(device)
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    limited = train(device)
    for thread in threads:
        thread.join()
    torch_lms.disable()
    expected = [views_and_in_place(device), lists_of_tensors(device)]
    assert all(map(torch.equal, plain, limited))
    for index, result in results.items():
        assert not isinstance(result, BaseException), result
        assert all(map(torch.equal, expected[index % 2], result))


def test_what_is_pinned_stays(device: str) -> None:
    pinned = inputs(device)
    torch_lms.pageout(pinned)
    torch_lms.wait()
    torch_lms.pin(pinned)
    assert swap.state(pinned) == "resident"
    limit(device)
    address = pinned.data_ptr()
    kept = [inputs(device) + index for index in range(16)]
    torch_lms.disable()
    limit(device)
    more = [each + 1 for each in kept]
    assert pinned.data_ptr() == address
    assert torch_lms.stats().pageouts > 0
    with pytest.raises(errors.PageoutError, match="pinned"):
        torch_lms.pageout(pinned)
    swap.unpin(pinned)
    with pytest.raises(errors.LmsError, match="call unpin once for each pin"):
        swap.unpin(pinned)
    assert torch_lms.pageout(pinned) == 1
    torch_lms.wait()
    assert swap.state(pinned) == "paged_out"
    assert torch.equal(pinned, inputs(device))
    assert torch.equal(more[0], inputs(device) + 1)


def test_an_op_that_fails_leaves_nothing_pinned(device: str) -> None:
    limit(device)
    tensor = inputs(device)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            tensor @ tensor
    others = [inputs(device) + index for index in range(16)]
    torch_lms.wait()
    assert swap.state(tensor) == "paged_out"
    del others


def test_what_cannot_move_stays_and_the_others_go(device: str) -> None:
    if device == "cuda":
        pytest.skip("has no memory of another library at hand")
    foreign = torch.frombuffer(bytearray(2 * MIB), dtype=torch.uint8)
    limit(device)
    foreign.add_(1)
    kept = [inputs(device) + index for index in range(16)]
    foreign.add_(1)
    assert swap.state(foreign) == "resident"
    assert torch_lms.stats().pageouts > 0
    assert int(foreign.sum()) == 4 * MIB
    assert all(torch.equal(each, inputs(device) + index) for index, each in enumerate(kept))


def test_a_full_host_exceeds_the_limit_with_a_warning(device: str) -> None:
    program = f"""
import warnings, torch, torch_lms
held = torch.cuda.memory_allocated() if "{device}" == "cuda" else 0
torch_lms.enable({{"{device}": held + (4 << 20)}}, min_bytes="64KiB", host_limit="256KiB")
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    kept = [torch.full((1 << 18,), float(index), device="{device}") + 1 for index in range(16)]
assert any("expected room" in str(each.message) for each in seen), seen
assert all(bool((each == index + 1).all()) for index, each in enumerate(kept))
assert torch_lms.stats().limit_exceeded > 0
# Below the limit again, and near it: what is asked for ahead fails, too, and nobody waits for it.
del kept[3:]
small, more = torch.zeros(1, device="{device}"), torch.zeros(3 << 16, device="{device}")
for _ in range(1200):
    small.add_(1)  # after a failure nothing is asked for until so many ops have passed
for _ in range(20):
    more.add_(1)
torch_lms.disable()
"""
    ended = run_python(program)
    assert ended.returncode == 0, ended.stderr


def test_a_forked_child_computes_on(device: str) -> None:
    if device == "cuda":
        pytest.skip("CUDA does not work in forked children")
    limit(device)
    kept = [inputs(device) + index for index in range(16)]
    child = os.fork()
    if child == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            right = all(torch.equal(each, inputs(device) + index) for index, each in enumerate(kept))
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert all(torch.equal(each, inputs(device) + index) for index, each in enumerate(kept))


# --- what is refused ------------------------------------------------------------------------------------


def test_the_programs_own_environment_is_refused(device: str) -> None:
    torch.cuda.create_swap_env()
    with pytest.raises(errors.EnvError, match="found the program's own"):
        torch_lms.enable({device: 64 * MIB})
    torch.cuda.close_swap_env()
    torch_lms.enable({device: 64 * MIB})


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_a_limit_is_at_most_what_is_free() -> None:
    torch_lms.enable("100%")
    assert torch_lms.stats().limit_bytes <= torch.cuda.get_device_properties(0).total_memory * 9 // 10
