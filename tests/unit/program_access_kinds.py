"""Kinds of access: programs that use a tensor through autograd, modules, compilers, views and threads.

Each takes a matrix of 8 x 6, uses it, and returns what it found; it may write to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.unit.access_kinds import AccessKind

__all__ = ["PROGRAM_KINDS"]

Program = Callable[[torch.Tensor], Any]
PROGRAM_KINDS: list[AccessKind] = []


def matrix(device: str) -> list[torch.Tensor]:
    return [torch.randn(8, 6).to(device)]


def kind(program: Program) -> Program:
    PROGRAM_KINDS.append(AccessKind(name=program.__name__, access=program, make=matrix))
    return program


def each(**programs: Program) -> None:
    """Programs that fit a line."""
    PROGRAM_KINDS.extend(AccessKind(name=name, access=program, make=matrix) for name, program in programs.items())


# --- views and threads ------------------------------------------------------------------------------------------------


@kind
def write_through_a_view(t: torch.Tensor) -> Any:
    t.view(-1)[7:9].mul_(5)
    return t.sum()


@kind
def write_through_an_alias(t: torch.Tensor) -> Any:
    t.detach().transpose(0, 1)[0] = 9
    return t.sum()


@kind
def new_thread(t: torch.Tensor) -> Any:
    found = []
    thread = threading.Thread(target=lambda: found.append(t * 3))
    thread.start()
    thread.join()
    return found


@kind
def write_then_read_from_a_thread(t: torch.Tensor) -> Any:
    thread = threading.Thread(target=lambda: t.add_(2))
    thread.start()
    thread.join()
    return t * 1


# --- autograd ------------------------------------------------------------------------------------------------------


@kind
def saved_for_backward(t: torch.Tensor) -> Any:
    weight = torch.ones(6, 4, device=t.device, requires_grad=True)
    (t @ weight).square().sum().backward()
    return weight.grad


@kind
def leaf_gradient(t: torch.Tensor) -> Any:
    leaf = t.detach().requires_grad_()
    (leaf.sin() * leaf).sum().backward()
    return leaf.grad


@kind
def double_backward(t: torch.Tensor) -> Any:
    leaf = t.detach().requires_grad_()
    (first,) = torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)
    return torch.autograd.grad(first.square().sum(), leaf)


@kind
def accumulated_gradient(t: torch.Tensor) -> Any:
    leaf = t.detach().requires_grad_()
    for factor in (1, 2):
        (leaf * factor).square().sum().backward()
    return leaf.grad


def _checkpointed(t: torch.Tensor, *, reentrant: bool) -> Any:
    leaf = t.detach().requires_grad_()
    checkpoint(lambda x: (x.exp() * x).sin(), leaf, use_reentrant=reentrant).sum().backward()
    return leaf.grad


each(
    checkpoint=lambda t: _checkpointed(t, reentrant=False),
    checkpoint_reentrant=lambda t: _checkpointed(t, reentrant=True),
    vmap=lambda t: torch.vmap(lambda row: row.dot(row))(t),
    func_grad=lambda t: torch.func.grad(lambda x: x.sin().sum())(t),
    func_jvp=lambda t: torch.func.jvp(torch.sin, (t,), (t,)),
    func_jacrev=lambda t: torch.func.jacrev(lambda x: x.square().sum(0))(t),
    func_hessian=lambda t: torch.func.hessian(lambda x: (x**3).sum())(t[0]),
)


@kind
def saved_tensor_changed_in_place(t: torch.Tensor) -> Any:
    leaf = torch.ones(8, 6, device=t.device, requires_grad=True)
    product = leaf * t
    t.add_(1)
    try:
        product.sum().backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return "no error"


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@kind
def custom_function(t: torch.Tensor) -> Any:
    leaf = t.detach().requires_grad_()
    _Scale.apply(leaf).sum().backward()
    return leaf.grad


@kind
def gradient_hook(t: torch.Tensor) -> Any:
    leaf = t.detach().requires_grad_()
    leaf.register_hook(lambda gradient: gradient * t)
    leaf.square().sum().backward()
    return leaf.grad


@kind
def functional_call(t: torch.Tensor) -> Any:
    layer = nn.Linear(6, 8, bias=False, device=t.device)
    return torch.func.functional_call(layer, {"weight": t}, (t,))


# --- modules, optimizers, compilers -----------------------------------------------------------------------------------

each(
    linear_weight=lambda t: functional.linear(torch.ones(2, 6, device=t.device), t),
    script=lambda t: torch.jit.script(_twice)(t),
    trace=lambda t: torch.jit.trace(_twice, torch.ones(8, 6, device=t.device))(t),
    compiled_graph=lambda t: torch.compile(_twice, backend="aot_eager")(t),
)


def _twice(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).relu()


@kind
def module_parameter(t: torch.Tensor) -> Any:
    torch.manual_seed(1)
    layer = nn.Linear(6, 8, device=t.device)
    layer.weight = nn.Parameter(t)
    layer(t).sum().backward()
    return layer.weight.grad


def _optimized(t: torch.Tensor, **options: Any) -> Any:
    parameter = nn.Parameter(t)
    optimizer = torch.optim.Adam([parameter], lr=0.1, **options)
    for _ in range(2):
        parameter.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameter.detach()


each(
    optimizer=lambda t: _optimized(t, foreach=False),
    optimizer_foreach=lambda t: _optimized(t, foreach=True),
    optimizer_fused=lambda t: _optimized(t, fused=True),
)


class _Logging(torch.Tensor):
    """A subclass that sees functions."""


@kind
def tensor_subclass(t: torch.Tensor) -> Any:
    return (t.as_subclass(_Logging) * 2).as_subclass(torch.Tensor)
