"""CUDA graphs, compiled functions and Triton kernels: what keeps addresses, or takes them by itself."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

import torch_lms
from tests.gpu import graph_scenarios
from tests.gpu.new_interpreters import NewInterpreters
from torch_lms.swap import state

MIB = 1 << 20
NEED_TRITON = [function.__name__ for function in graph_scenarios.NEED_TRITON]


def filled(mib: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((mib * MIB // 4,), value, dtype=torch.float32, device="cuda")


def page_out(*tensors: torch.Tensor) -> None:
    torch_lms.pageout(*tensors)
    torch_lms.wait()


def scenario(name: str) -> object:
    marks = [pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")] if name in NEED_TRITON else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [scenario(function.__name__) for function in graph_scenarios.SCENARIOS])
def test_graph(name: str, interpreters: NewInterpreters) -> None:
    interpreters.check(name)


@pytest.fixture(scope="module")
def interpreters(request: pytest.FixtureRequest) -> Iterator[NewInterpreters]:
    """All scenarios that are asked for run at the same time: most of their time is PyTorch's import."""
    names = [item.callspec.params["name"] for item in request.session.items if item.name.startswith("test_graph[")]
    code = "from tests.gpu import graph_scenarios; graph_scenarios.{}()"
    with NewInterpreters({name: ["-c", code.format(name)] for name in names}) as started:
        yield started


# --- Triton and compiled functions --------------------------------------------------------------------


@pytest.fixture
def triton_kernels() -> ModuleType:
    pytest.importorskip("triton")
    return importlib.import_module("tests.gpu.triton_kernels")


def test_triton_kernel_gets_the_device_addresses_of_paged_out_tensors(
    triton_kernels: ModuleType, paged: ModuleType
) -> None:
    x, y, out = filled(4, 2), filled(4, 3), filled(4, 0)
    for turn in range(3):
        page_out(x, y, out)
        triton_kernels.add_kernel[(x.numel() // 1024,)](x, y, out, x.numel(), BLOCK=1024)
        assert {state(tensor) for tensor in (x, y, out)} == {"resident"}
        assert out.eq(5 + turn).all()
        x.add_(1)


def test_triton_kernel_calls_a_pageout_off_before_it_writes(triton_kernels: ModuleType, paged: ModuleType) -> None:
    x, one = filled(4, 0), filled(4, 1)
    for turn in range(20):
        torch_lms.pageout(x)
        triton_kernels.add_kernel[(x.numel() // 1024,)](x, one, x, x.numel(), BLOCK=1024)
        page_out(x)
        assert x.eq(turn + 1).all()


def test_compiled_function_reads_and_writes_paged_out_inputs(paged: ModuleType) -> None:
    pytest.importorskip("triton")

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        return (x * y + 1).relu().sum(0)

    compiled = torch.compile(function)
    x, y = torch.randn(512, 512, device="cuda"), torch.zeros(512, 512, device="cuda")
    for turn in range(4):
        page_out(x, y)
        found = compiled(x, y)
        assert torch.equal(found, compiled(x, y.sub_(1)))
        assert y.eq(turn + 1).all()
