"""Compiled, scripted, traced and exported programs on paged-out tensors."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.paging_states import STATES, Place, round_trip, snapshot

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="Inductor needs a C++ compiler"
)


class Block(torch.nn.Module):
    """A matmul that Inductor leaves to a library, and element-wise work that it fuses into kernels of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)
        self.scale = torch.nn.Parameter(torch.randn(8))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return torch.tanh(self.linear(x) * self.scale + x).square()


def given() -> torch.Tensor:
    return torch.linspace(-2, 2, 40).view(5, 8)


def seen(program: Callable[[torch.Tensor], torch.Tensor], block: Block, place: Place) -> Any:
    """Two steps, with everything that takes part paged before each part of a step."""
    x = given().requires_grad_()
    everything = [x, *block.parameters(), block.count]
    block.zero_grad()
    block.count.detach().zero_()
    results = []
    for _ in range(2):
        place(everything)
        out = program(x)
        place([*everything, out])
        out.sum().backward()
        results += [snapshot(out), snapshot([tensor.grad for tensor in everything])]
    round_trip(everything)
    return results, snapshot(everything)


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, tuple[Block, Callable[[torch.Tensor], torch.Tensor]]]]:
    """Each is compiled once, by its first test, for all states."""
    made: dict[str, tuple[Block, Callable[[torch.Tensor], torch.Tensor]]] = {}
    yield made
    torch._dynamo.reset()


def make(kind: str) -> tuple[Block, Callable[[torch.Tensor], torch.Tensor]]:
    block = Block()
    if kind == "scripted":
        return block, torch.jit.script(block)
    if kind == "traced":
        return block, torch.jit.trace(block, given(), check_trace=False)
    if kind == "exported":
        exported = torch.export.export(block, (given(),)).module()
        return exported, exported
    return block, torch.compile(block, backend=kind, fullgraph=True)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    "kind",
    ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow]), "scripted", "traced", "exported"],
)
def test_program_on_paged_out_tensors_is_bit_equal(
    kind: str, state: str, programs: dict[str, Any], paged: ModuleType
) -> None:
    if kind not in programs:
        programs[kind] = make(kind)
        seen(*reversed(programs[kind]), STATES["plain"])  # the first runs of a script are for its profiler
    block, program = programs[kind]
    plain = seen(program, block, STATES["plain"])
    assert seen(program, block, STATES[state]) == plain


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_paging_does_not_recompile(backend: str, paged: ModuleType) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x * 2 + 1).relu(), backend=backend, fullgraph=True)
    x = given()
    expected = compiled(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        for place in STATES.values():
            place([x])
            assert torch.equal(compiled(x), expected)
            round_trip([x])
        paged.enable(limit="1GiB", min_bytes=1)
        assert torch.equal(compiled(x), expected)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_in_place_kernel_of_inductor_writes_what_comes_back(
    state: str, programs: dict[str, Any], paged: ModuleType
) -> None:
    if "in_place" not in programs:
        programs["in_place"] = torch.compile(lambda x, y: x.mul_(2).add_(y), fullgraph=True)
    x, y, alias = given(), given() + 1, None
    alias = x[1:3]
    STATES[state]([x, y])
    programs["in_place"](x, y)
    round_trip([x, y])
    assert torch.equal(x, given() * 2 + (given() + 1))
    assert torch.equal(alias, x[1:3])


def test_compiling_with_parameters_out_does_not_change_the_graph(paged: ModuleType) -> None:
    torch._dynamo.reset()
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph.forward

    for state in ("plain", "paged_out"):
        torch._dynamo.reset()
        block, x = Block(), given()
        STATES[state]([x, *block.parameters()])
        torch.compile(block, backend=keep)(x)
    assert graphs[0] == graphs[1]
    assert len(graphs) == 2


class Deep(torch.nn.Module):
    """Blocks that keep much for their backward."""

    def __init__(self, number: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ups = torch.nn.ModuleList(torch.nn.Linear(128, 512) for _ in range(number))
        self.downs = torch.nn.ModuleList(torch.nn.Linear(512, 128) for _ in range(number))

    def block(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return x + self.downs[number](torch.nn.functional.gelu(self.ups[number](x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(len(self.ups)):
            x = self.block(number, x)
        return x

    def step(self) -> Any:
        self.zero_grad()
        loss = self(torch.linspace(-1, 1, 1024 * 128).view(1024, 128)).square().mean()
        loss.backward()
        return snapshot([loss, *(parameter.grad for parameter in self.parameters())])


def compiled(part: str) -> tuple[Deep, Any, int]:
    """A model of which blocks, or the whole, are compiled; what a step comes to; and half of its peak."""
    model = Deep()
    if part == "blocks":
        model.block = torch.compile(model.block)  # type: ignore[method-assign]
    else:
        model.compile()
    model.step()
    torch_lms.swap.count_cpu_allocations()
    held_bytes = torch_lms.stats(reset=True).allocated_bytes
    expected = model.step()
    return model, expected, held_bytes + (torch_lms.stats().peak_allocated_bytes - held_bytes) // 2


def three_steps_of_compiled_blocks() -> dict[str, Any]:
    model, expected, limit_bytes = compiled("blocks")
    torch_lms.enable({"cpu": limit_bytes}, min_bytes="64KiB")
    torch_lms.stats(reset=True)
    equal = [model.step() == expected for _ in range(3)]
    stats = torch_lms.stats()
    return {
        "equal": equal,
        "paged": stats.pageout_bytes > 0,
        "within": stats.peak_allocated_bytes <= limit_bytes and stats.limit_exceeded == 0,
    }


def a_step_of_a_compiled_whole() -> tuple[str, bool]:
    """What is said, and whether all is as before when automatic mode has ended."""
    model, expected, limit_bytes = compiled("whole")
    torch_lms.enable({"cpu": limit_bytes}, min_bytes="64KiB")
    said = "nothing"
    try:
        model.step()
    except RuntimeError as error:
        said = str(error)
    torch_lms.disable()
    return said, bool(model.step() == expected)


@counts_exactly
@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compiled_blocks_train_in_half_of_their_peak() -> None:
    assert in_fresh_process(three_steps_of_compiled_blocks, within_s=240) == {
        "equal": [True] * 3,
        "paged": True,
        "within": True,
    }


@counts_exactly
@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_whole_without_room_says_what_cannot_move() -> None:
    said, as_before = in_fresh_process(a_step_of_a_compiled_whole, within_s=240)
    assert re.search(r"inputs of running ops: [1-9].*a limit of .* would do here", said)
    assert as_before
