"""What CUDA graphs go through, each in a process of its own: a capture that fails disturbs what follows it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import torch_lms
from torch_lms.errors import EnvError, PageoutError

MIB = 1 << 20


def filled(mib: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((mib * MIB // 4,), value, dtype=torch.float32, device="cuda")


def page_out(*tensors: torch.Tensor) -> None:
    torch_lms.pageout(*tensors)
    torch_lms.wait()


def warm_up(function: Callable[[], torch.Tensor]) -> None:
    """As PyTorch wants it before a capture: on another stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)


def capture(function: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    warm_up(function)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def replay_while_others_move() -> None:
    torch_lms.enable("512MiB")
    static = filled(4)
    graph, doubled = capture(lambda: static * 2)
    address = static.data_ptr()
    for turn in range(3):
        others = [filled(64, value) for value in range(12)]  # 768 MiB
        static.fill_(turn)
        graph.replay()
        assert doubled.eq(2 * turn).all()
        assert [other.max().item() for other in others] == list(range(12))
    assert torch_lms.stats().pageouts > 0
    assert static.data_ptr() == address


def refuse_tensors_of_a_graph() -> None:
    torch_lms.enable("50%")
    static = filled(4)
    graph, doubled = capture(lambda: static * 2)
    for tensor in (static, doubled):
        with pytest.raises(PageoutError):
            torch_lms.pageout(tensor)
    graph.replay()
    assert doubled.eq(2).all()


def refuse_pageouts_during_a_capture() -> None:
    static, other = filled(4), filled(4, 3)
    page_out(other)
    other.add_(1)
    warm_up(lambda: static * 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = static * 2
        with pytest.raises(PageoutError, match="being captured"):
            torch_lms.pageout(other)
    static.fill_(5)
    graph.replay()
    assert doubled.eq(10).all()
    page_out(other)
    assert other.eq(4).all()


def capture_with_an_input_that_is_out() -> None:
    torch_lms.enable("50%")
    static, weight = filled(4), filled(4, 3)
    warm_up(lambda: static * weight)
    page_out(weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = static * weight
    for value in (1, 5, 7):
        static.fill_(value)
        weight.fill_(value + 1)  # a captured page-in would undo this
        graph.replay()
        assert product.eq(value * (value + 1)).all()


def capture_with_an_input_that_is_out_by_hand() -> None:
    static, weight = filled(4), filled(4, 3)
    warm_up(lambda: static * weight)
    page_out(weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = static * weight
    for value in (1, 5, 7):
        static.fill_(value)
        weight.fill_(value + 1)
        graph.replay()
        assert product.eq(value * (value + 1)).all()


def pin_tensors_of_an_earlier_graph() -> None:
    static = filled(4)
    graph, doubled = capture(lambda: static * 2)
    torch_lms.pin(static)
    torch_lms.pin(doubled)
    with pytest.raises(PageoutError):
        torch_lms.pageout(static)
    static.fill_(5)
    graph.replay()
    assert doubled.eq(10).all()


def refuse_enable_after_a_capture() -> None:
    static = filled(4)
    graph, doubled = capture(lambda: static * 2)
    with pytest.raises(EnvError, match="graph"):
        torch_lms.enable("50%")
    graph.replay()
    assert doubled.eq(2).all()
    del graph, doubled
    gc.collect()
    torch.cuda.empty_cache()
    torch_lms.enable("50%")
    torch_lms.disable()


def train_with_a_captured_step() -> None:
    """The whole-network capture of PyTorch's manual, with other storages moving between replays."""
    torch_lms.enable("1GiB")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)).cuda()
    batch, target = torch.randn(256, 512, device="cuda"), torch.randn(256, 512, device="cuda")

    def loss() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        found = (model(batch) - target).square().mean()
        found.backward()
        return found

    eager = loss().item()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    graph, captured = capture(loss)
    for _ in range(3):
        others = [filled(128, value) for value in range(10)]
        graph.replay()
        assert captured.item() == eager
        assert all(
            torch.equal(parameter.grad, gradient)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True)
        )
        assert [other.max().item() for other in others] == list(range(10))


def compile_with_graphs() -> None:
    """Inductor's own graphs keep the addresses of parameters."""
    torch_lms.enable("256MiB")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).cuda()
    compiled = torch.compile(model, mode="reduce-overhead")
    batch = torch.randn(64, 512, device="cuda")
    with torch.no_grad():
        expected = compiled(batch).clone()
        torch.testing.assert_close(expected, model(batch), rtol=1e-4, atol=1e-4)
        for _ in range(6):
            others = [filled(32, value) for value in range(10)]
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(batch), expected)
            assert [other.max().item() for other in others] == list(range(10))


def compiled_training_under_a_limit() -> None:
    """Inductor's kernels take addresses themselves, several at a time."""
    layers = [torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))] * 3
    batch = torch.randn(8192, 512, generator=torch.Generator().manual_seed(0)).cuda()
    compiled = torch.compile(torch.nn.Sequential(*layers).cuda())
    start = [parameter.detach().clone() for parameter in compiled.parameters()]

    def train(others: list[torch.Tensor]) -> tuple[list[float], list[torch.Tensor]]:
        with torch.no_grad():
            for parameter, value in zip(compiled.parameters(), start, strict=True):
                parameter.copy_(value)
        losses = []
        for _ in range(3):
            loss = compiled(batch).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in compiled.parameters():
                    parameter.sub_(parameter.grad)
                    parameter.grad = None
            losses.append(loss.item())
            assert [other.max().item() for other in others] == list(range(len(others)))
        return losses, [parameter.detach().clone() for parameter in compiled.parameters()]

    train([])
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses, parameters = train([])
    # What a compiled graph allocates is known only once an op has seen it: room for all of that, not for the rest.
    torch_lms.enable(torch.cuda.max_memory_allocated() + 64 * MIB)
    limited_losses, limited_parameters = train([filled(64, value) for value in range(8)])
    assert torch_lms.stats().pageouts > 0
    assert losses == limited_losses
    assert all(torch.equal(one, other) for one, other in zip(parameters, limited_parameters, strict=True))


def triton_kernel_under_a_limit() -> None:
    from tests.gpu.triton_kernels import add_kernel

    torch_lms.enable("256MiB")
    x, y, out = filled(32, 2), filled(32, 3), filled(32, 0)
    for turn in range(3):
        others = [filled(32, value) for value in range(12)]
        add_kernel[(x.numel() // 1024,)](x, y, out, x.numel(), BLOCK=1024)
        assert out.eq(5 + turn).all()
        x.add_(1)
        assert [other.max().item() for other in others] == list(range(12))


def triton_kernel_whose_tensors_do_not_fit() -> None:
    """The host copy has to serve one of the three, or an error has to say that there is no room."""
    from tests.gpu.triton_kernels import add_kernel

    torch_lms.enable("256MiB")
    x, y, out = filled(96, 2), filled(96, 3), filled(96, 0)
    try:
        add_kernel[(x.numel() // 1024,)](x, y, out, x.numel(), BLOCK=1024)
    except torch.OutOfMemoryError:
        return
    assert (out.min().item(), out.max().item()) == (5, 5)


NEED_TRITON: list[Callable[[], None]] = [
    compile_with_graphs,
    compiled_training_under_a_limit,
    triton_kernel_under_a_limit,
    triton_kernel_whose_tensors_do_not_fit,
]
SCENARIOS: list[Callable[[], None]] = [
    replay_while_others_move,
    refuse_tensors_of_a_graph,
    refuse_pageouts_during_a_capture,
    capture_with_an_input_that_is_out,
    capture_with_an_input_that_is_out_by_hand,
    pin_tensors_of_an_earlier_graph,
    refuse_enable_after_a_capture,
    train_with_a_captured_step,
    *NEED_TRITON,
]
