"""While an op is recorded Python code of anybody's may run on its thread, and run ops: a signal's, the collector's."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import wait_for_planner
from tests.unit.trainings import MIN_BYTES, one_thread
from torch_lms.swap.planning import last_trace

WIDTH, ROWS, LAYERS, STEPS = 128, 256, 6, 24
LIMIT_BYTES = 2500 << 10
DIGITS = torch.ones(4)


def train(layers: nn.ModuleList, scope: Callable[[int], AbstractContextManager[object]]) -> list[list[float]]:
    """Sums of the gradients of each step, whose activations run within what the function makes of the step's number."""
    torch.manual_seed(0)
    made = []
    for step in range(STEPS):
        x = torch.randn(ROWS, WIDTH)
        for layer in layers:
            hidden = layer(x)
            with scope(step):
                rectified = torch.relu(hidden + 1)
                x = x + rectified * torch.sigmoid(rectified)
        gradients = torch.autograd.grad(x.square().mean(), list(layers.parameters()))
        made.append([gradient.double().sum().item() for gradient in gradients])
        wait_for_planner()
    return made


def make_layers(kind: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH), count: int = LAYERS) -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList(kind() for _ in range(count))


def equal_under_a_limit(layers: nn.ModuleList, scope: Callable[[int], AbstractContextManager[object]]) -> bool:
    """Whether a training is the same under a limit that it is planned for."""
    expected = train(layers, lambda step: nullcontext())
    torch_lms.enable(LIMIT_BYTES, min_bytes=MIN_BYTES)
    made = train(layers, scope)
    assert last_trace() is not None
    return made == expected


# --- code that runs beside ------------------------------------------------------------------------------------------


@contextmanager
def signals(step: int) -> Iterator[None]:
    """A handler that uses tensors is called in the middle of whatever runs."""

    def handle(number: int, frame: FrameType | None) -> None:
        DIGITS.norm().item()

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class Cycle:
    """What dies in a cycle is finalized wherever the collector runs."""

    def __init__(self) -> None:
        self.me, self.tensor = self, torch.ones(4)

    def __del__(self) -> None:
        self.tensor.add_(1)


@contextmanager
def garbage(step: int) -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(7)
    for _ in range(20):
        Cycle()
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def profiled(step: int) -> Iterator[None]:
    def see(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name in ("here", "_in_frames"):
            DIGITS.norm()

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


@one_thread()
def beside(scope: Callable[[int], AbstractContextManager[object]]) -> bool:
    return equal_under_a_limit(make_layers(), scope)


@counts_exactly
@pytest.mark.parametrize("scope", [signals, garbage, profiled], ids=lambda scope: scope.__name__)
def test_ops_of_code_that_runs_beside_a_recording_are_no_part_of_it(
    scope: Callable[[int], AbstractContextManager[object]],
) -> None:
    assert in_fresh_process(beside, scope)


@one_thread()
def modules_that_run_ops() -> bool:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def named_modules(self, *args: object, **kwargs: object) -> Iterator[tuple[str, nn.Module]]:  # type: ignore[override]
            DIGITS.norm()
            return super().named_modules()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    return equal_under_a_limit(make_layers(Outer), lambda step: nullcontext())


@counts_exactly
def test_modules_that_run_ops_when_they_are_asked_for_theirs() -> None:
    assert in_fresh_process(modules_that_run_ops)


@one_thread()
def compiled_too_often() -> bool:
    layers = make_layers(count=12)  # more than torch.compile takes of one function
    for layer in layers:
        layer.compile(backend="eager")
    return equal_under_a_limit(layers, lambda step: nullcontext())


@counts_exactly
@pytest.mark.filterwarnings("ignore:.*recompile_limit")
def test_torch_compile_takes_no_interest_in_what_records() -> None:
    assert in_fresh_process(compiled_too_often)


# --- modes ----------------------------------------------------------------------------------------------------------


class Halve(TorchDispatchMode):
    """A simulated quantizer, say."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func in (torch.ops.aten.sigmoid.default, torch.ops.aten.relu.default) else result


def halved_later(step: int) -> AbstractContextManager[object]:
    return Halve() if step >= STEPS // 2 else nullcontext()


@one_thread()
def with_a_mode() -> tuple[bool, int]:
    expected = train(make_layers(), halved_later)
    torch_lms.enable(4 * LIMIT_BYTES // 3, min_bytes=MIN_BYTES, swap=False)
    made = train(make_layers(), halved_later)
    return made == expected, torch_lms.stats().recomputations


@counts_exactly
def test_what_a_dispatch_mode_has_changed_is_not_made_again_without_it() -> None:
    equal, recomputations = in_fresh_process(with_a_mode)
    assert equal
    assert recomputations > 0
