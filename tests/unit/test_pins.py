"""What ops and programs have used can go out again, however they ended; and programs of other kinds within a limit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import torch_lms
from tests.unit.markers import counts_exactly
from tests.unit.trainings import MIN_BYTES, one_thread, same_bits
from torch_lms._core import core

MIB = 1 << 20
NUMEL = MIB // 4


def held_bytes() -> int:
    """What cannot go out because an op uses it, or the program has pinned it."""
    gc.collect()
    torch.ones(1).add_(1)  # what has been given out to the thread goes back
    report = core.memory_report("cpu")
    return report["in_use_bytes"] + report["fixed_bytes"]


# --- compiled functions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", ["aot_eager", "eager"])
def test_a_function_compiled_for_sizes_that_change_leaves_nothing_pinned(chosen: str, paged: ModuleType) -> None:
    paged.enable({"cpu": 64 * MIB}, min_bytes=MIN_BYTES)
    before = held_bytes()  # other tests of this process may have left something
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
    torch._dynamo.reset()
    function = torch.compile(model, dynamic=True, backend=chosen)
    used = list(model.parameters())
    for rows in (100, 130, 70):
        used.append(torch.randn(rows, 128))
        function(used[-1]).square().mean().backward()
    assert held_bytes() <= before
    torch_lms.pageout(used)  # raises for what is pinned
    torch_lms.wait()
    assert held_bytes() <= before


# --- exceptions -----------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """As KeyboardInterrupt: no `except Exception` stops it."""


class Failing(torch.autograd.Function):
    """Raises in one of its directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: BaseException | None, error_in_backward: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.error = error_in_backward
        y = x * 2
        if error is not None:
            raise error
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        y = gradients[0] * x
        raise ctx.error
        return y, None, None


def _wrong_shapes(x: torch.Tensor, _: BaseException) -> None:
    x.view(512, 512) @ x.view(1024, 256)


def _in_a_list(x: torch.Tensor, _: BaseException) -> None:
    torch.cat([x.view(512, 512), x.view(1024, 256)], 1)


def _in_a_forward(x: torch.Tensor, error: BaseException) -> None:
    Failing.apply(x.requires_grad_(), error, None)


def _in_a_backward(x: torch.Tensor, error: BaseException) -> None:
    Failing.apply(x.requires_grad_(), None, error).sum().backward()


def _in_a_hook(x: torch.Tensor, error: BaseException) -> None:
    def fail(_: torch.Tensor) -> None:
        raise error

    y = x.requires_grad_() * 2
    y.register_hook(fail)
    (y * x).sum().backward()


def _in_an_op(x: torch.Tensor, error: BaseException) -> None:
    global raised
    raised = error
    _raising(x)


def _in_a_dispatch_mode(x: torch.Tensor, error: BaseException) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Raise(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            func(*args, **(kwargs or {}))
            raise error

    with Raise():
        x + 1


raised: BaseException = ValueError()


@torch.library.custom_op("torch_lms_tests::raising", mutates_args=())
def _raising(a: torch.Tensor) -> torch.Tensor:
    a + 1
    raise raised


FAILURES: list[Callable[[torch.Tensor, BaseException], None]] = [
    _wrong_shapes,
    _in_a_list,
    _in_a_forward,
    _in_a_backward,
    _in_a_hook,
    _in_an_op,
    _in_a_dispatch_mode,
]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Interrupted])
@pytest.mark.parametrize("fail", FAILURES)
def test_what_an_op_that_raised_has_used_can_go_out(
    fail: Callable[[torch.Tensor, BaseException], None], error: type[BaseException], paged: ModuleType
) -> None:
    paged.enable({"cpu": 64 * MIB}, min_bytes=MIN_BYTES)
    before = held_bytes()  # other tests of this process may have left something
    x = torch.full((NUMEL,), 3.0)
    for _ in range(3):
        own = error("the program's own")
        with pytest.raises((error, RuntimeError)):
            fail(x, own)
        own.__traceback__ = None  # its frames hold tensors, and graphs hold the error
    assert held_bytes() <= before
    torch_lms.pageout(x)
    torch_lms.wait()
    assert held_bytes() <= before
    x = x.detach()
    others = [torch.full((NUMEL,), float(number)) for number in range(80)]  # it goes out under pressure as well
    assert x.sum().item() == 3.0 * NUMEL
    assert all(other[-1].item() == number for number, other in enumerate(others))


# --- programs of other kinds ----------------------------------------------------------------------------------------


Make = Callable[[], list[torch.Tensor]]


def nested() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        parts = [torch.randn(length, 64, generator=generator) for length in (300, 500 + step, 200, 700)]
        batch = torch.nested.nested_tensor(parts, layout=torch.jagged)
        optimizer.zero_grad()
        loss = (model(batch) - batch).values().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def recurrent(packed: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.LSTM(64, 64, batch_first=True) for _ in range(6))
    losses = []
    for step in range(3):
        x = torch.randn(16, 64, 64, generator=torch.Generator().manual_seed(step))
        for layer in layers:
            if packed:
                lengths = torch.arange(64, 48, -1)
                given = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
                x = nn.utils.rnn.pad_packed_sequence(layer(given)[0], batch_first=True)[0]
            else:
                x = layer(x)[0]
        layers.zero_grad()
        loss = x.square().mean()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(parameter.grad for parameter in layers.parameters() if parameter.grad is not None)]


def hessian() -> list[torch.Tensor]:
    torch.manual_seed(0)
    weight, x, direction = torch.randn(96, 96), torch.randn(96), torch.randn(96)

    def function(given: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            given = torch.tanh(weight @ given)
        return given.square().sum()

    value = torch.func.hessian(function)(x)
    product, change = torch.func.jvp(torch.func.grad(function), (x,), (direction,))
    both = torch.func.jvp(torch.func.hessian(function), (x,), (direction,))
    return [value, product, change, *both]


PROGRAMS: dict[str, tuple[Make, int]] = {  # with the percentage of the plain peak that the limit is
    "nested": (nested, 70),
    "lstm": (lambda: recurrent(packed=False), 60),
    "packed lstm": (lambda: recurrent(packed=True), 60),
    "hessian": (hessian, 70),
}


@counts_exactly
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("program", PROGRAMS)
@one_thread()
def test_a_program_of_another_kind_within_a_limit_is_bit_equal(program: str, paged: ModuleType) -> None:
    make, percent = PROGRAMS[program]
    make()  # what is made once
    gc.collect()
    torch_lms.swap.count_cpu_allocations()
    before = paged.stats(reset=True).allocated_bytes
    expected = make()
    peak = paged.stats().peak_allocated_bytes - before
    numbers = [tensor.numpy().copy() for tensor in expected]
    del expected
    limit_bytes = before + peak * percent // 100
    paged.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES)
    paged.stats(reset=True)
    made = make()
    stats = paged.stats()
    paged.disable()
    assert same_bits(made, [torch.from_numpy(number) for number in numbers])
    assert stats.pageouts > 0
    assert stats.pageins > 0
    assert stats.peak_allocated_bytes <= limit_bytes
    assert stats.limit_exceeded == 0


# --- requests of many threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("automatic", [False, True], ids=["by hand", "automatic"])
def test_requests_of_many_threads_for_tensors_in_use_are_declined_or_enqueued(
    automatic: bool, paged: ModuleType
) -> None:
    threads, rounds = 8, 150
    if automatic:
        paged.enable({"cpu": 64 * MIB}, min_bytes=MIN_BYTES)
    tensors = [torch.full((10_000,), float(number)) for number in range(6)]
    begin = threading.Barrier(threads)

    def work(seed: int) -> list[int]:
        counts = []
        begin.wait()
        for turn in range(rounds):
            chosen = [tensors[(seed + turn + i) % len(tensors)] for i in range(3)]
            if turn % 2 == seed % 2:
                counts.append(paged.pageout(chosen))
            else:
                sums = [tensor.sum().item() for tensor in chosen]
                assert sums == [10_000.0 * ((seed + turn + i) % len(tensors)) for i in range(3)]
        return counts

    with ThreadPoolExecutor(threads) as pool:
        counts = [count for future in [pool.submit(work, seed) for seed in range(threads)] for count in future.result()]
    assert len(counts) == threads * rounds // 2
    assert set(counts) <= {0, 1, 2, 3}
    assert sum(counts) > 0
    paged.wait()
    assert [tensor[-1].item() for tensor in tensors] == [float(number) for number in range(6)]


# --- addresses that were not handed out ------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [torch.Tensor.numpy, torch.Tensor.__dlpack__])
def test_a_refused_address_pins_nothing(ask: Callable[[torch.Tensor], Any], paged: ModuleType) -> None:
    weight = torch.ones(4 * NUMEL, requires_grad=True)
    paged.pageout(torch.ones(4 * NUMEL))  # from here on such functions are watched
    with pytest.raises((RuntimeError, BufferError)):
        ask(weight)
    assert paged.pageout(weight) == 1
    paged.wait()


def test_a_refused_slice_of_a_storage_pins_nothing(paged: ModuleType) -> None:
    tensor = torch.ones(NUMEL)
    paged.pageout(torch.ones(NUMEL))
    with pytest.raises(RuntimeError):
        tensor.untyped_storage()[0:8:2]
    assert paged.pageout(tensor) == 1
    paged.wait()
