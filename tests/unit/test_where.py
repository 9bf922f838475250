"""Where plans say that a storage is made: the module and the line, of backward's ops those of their forward."""

from __future__ import annotations

import sys
import weakref
from types import ModuleType

import pytest
import torch
from torch import nn

import torch_lms
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import PROGRAMS, limit_for, run
from tests.unit.trainings import MIN_BYTES, one_thread
from torch_lms.plan import Trace
from torch_lms.swap import planning, where
from torch_lms.swap.planning import last_trace

LAYERS = {str(number) for number in range(6)}


def traced(program: str) -> Trace:
    torch_lms.enable({"cpu": limit_for(PROGRAMS[program], 0.8)}, min_bytes=MIN_BYTES)
    for _ in run(PROGRAMS[program]):
        pass
    trace = last_trace()
    assert trace is not None
    return trace


def modules_of(trace: Trace, op: str) -> set[str]:
    return {storage.module for number, storage in enumerate(trace.storages) if trace.op_of(number) == op}


@counts_exactly
@one_thread()
def test_backward_ops_are_at_the_places_of_their_forward() -> None:
    trace = traced("training")
    assert modules_of(trace, "aten::gelu") == LAYERS
    assert modules_of(trace, "aten::gelu_backward") == LAYERS
    assert modules_of(trace, "aten::mm") == {f"{layer}.{name}" for layer in LAYERS for name in ("up", "down")}
    lines = {one.line for number, one in enumerate(trace.storages) if trace.op_of(number) == "aten::gelu_backward"}
    assert len(lines) == 1
    assert lines.pop().split(":")[0].endswith("planned_programs.py")


@counts_exactly
@one_thread()
def test_a_forward_that_is_run_again_in_backward_has_its_own_places() -> None:
    trace = traced("checkpoint")  # of each layer, which is the outermost module then
    assert modules_of(trace, "aten::gelu") == {""}
    assert modules_of(trace, "aten::addmm") == {"up", "down"}


@counts_exactly
@one_thread()
@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(("module", "name"), [(where, "here"), (planning, "start")])
def test_what_a_signal_raises_in_our_own_code_reaches_the_program(
    module: ModuleType, name: str, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a Ctrl-C does that comes just then."""
    asked = []

    def interrupted() -> None:
        asked.append(name)
        monkeypatch.undo()
        raise raised

    monkeypatch.setattr(module, name, interrupted)
    with pytest.raises(raised):
        traced("training")
    assert asked == [name]


class Looking(nn.Module):
    """Asks where it is while it has something that it lets go of."""

    def forward(self, x: torch.Tensor) -> bool:
        gone = weakref.ref(x)
        where.here()
        del x
        return gone() is None


@pytest.mark.skipif(sys.version_info < (3, 12), reason="this Python's frames keep what they are asked for")
def test_to_ask_where_a_program_is_holds_nothing_of_it() -> None:
    assert Looking()(torch.ones(1).clone())


class Captured(nn.Module):
    """A function inside of it uses it, too."""

    def forward(self) -> tuple[str, str]:
        return (lambda: (self.training, where.here())[1])()


def test_a_module_that_a_function_inside_captures_does_no_harm() -> None:
    path, line = Captured()()
    assert path == ""
    assert line.startswith(__file__)
