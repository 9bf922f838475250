"""Differentiation with the tensors that it saved, or its parameters and gradients, on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import CHAOS
from tests.unit.paging_states import STATES, Place, round_trip, snapshot
from torch_lms.errors import EnvError, PageoutError

pytestmark = pytest.mark.filterwarnings(
    "ignore:Anomaly Detection", "ignore:Full backward hook", "ignore:.torch.jit.script. is deprecated"
)

Step = Callable[[Place], Any]


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(9, 9, requires_grad=True), torch.randn(9, 9, requires_grad=True)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 12), torch.nn.LayerNorm(12), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Linear(12, 2)
    )


def everything_of(module: torch.nn.Module) -> list[torch.Tensor]:
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [*module.parameters(), *module.buffers(), *gradients]


def where_allowed(place: Place) -> Place:
    """For hooks, which may run inside an op: what that op uses is refused, and stays."""

    def run(tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            with contextlib.suppress(PageoutError):
                place([tensor])

    return run


# --- programs: each pages where it says, and returns what has to be equal ------------------------------


def backward_after_forward(place: Place) -> Any:
    x, w = leaves()
    hidden = torch.tanh(x @ w)
    out = (hidden * w).sum()
    place([x, w, hidden, out])
    out.backward()
    return x.grad, w.grad


def gradients_out_between_backwards(place: Place) -> Any:
    x, w = leaves()
    for _ in range(3):
        (x @ w).exp().sum().backward()
        place([x.grad, w.grad])
    return x.grad, w.grad


def retained_graph(place: Place) -> Any:
    x, w = leaves()
    hidden = x @ w
    hidden.retain_grad()
    out = hidden.sin().sum()
    out.backward(retain_graph=True)
    place([x, w, hidden, hidden.grad])
    out.backward()
    return x.grad, w.grad, hidden.grad


def double_backward(place: Place) -> Any:
    x, w = leaves()
    out = torch.sigmoid(x @ w).pow(2)
    place([x, w, out])
    first = torch.autograd.grad(out.sum(), (x, w), create_graph=True)
    place([x, w, out, *first])
    return first, torch.autograd.grad(sum(g.pow(2).sum() for g in first), (x, w))


def forward_mode(place: Place) -> Any:
    x, w = leaves()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), w.detach())
        place([x, w])
        out = (dual @ w).cos()
        return torch.autograd.forward_ad.unpack_dual(out)


def checkpointed(use_reentrant: bool) -> Step:
    def run(place: Place) -> Any:
        module, x = model(), torch.randn(4, 6, requires_grad=True)
        hidden = checkpoint(module[:3], x, use_reentrant=use_reentrant)
        out = checkpoint(module[3:], hidden, use_reentrant=use_reentrant)
        place([x, hidden, out, *module.parameters()])
        out.square().sum().backward()
        return out, x.grad, [parameter.grad for parameter in module.parameters()]

    return run


class Squeeze(torch.autograd.Function):
    """Saves an input, an output and an intermediate; keeps a tensor beside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: Place) -> torch.Tensor:
        scale = x.abs().max()
        out = x / (1 + x.abs())
        ctx.save_for_backward(x, out, scale)
        ctx.beside = x.detach() * 2
        ctx.place = where_allowed(place)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, out, scale = ctx.saved_tensors
        ctx.place([x, out, scale, ctx.beside, grad])
        return grad * (1 - out.abs()) / (1 + x.abs()) * scale + ctx.beside, None


def custom_function(place: Place) -> Any:
    x, w = leaves()
    out = Squeeze.apply(x @ w, place)
    place([x, w, out])
    out.sum().backward()
    return out, x.grad, w.grad


class Nested(torch.autograd.Function):
    """Runs a backward in its backward, which runs one in its own: beyond depth 60 on other threads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, place: Place) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.depth, ctx.place = depth, where_allowed(place)
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if ctx.depth == 0:
            return grad * 1.5, None, None
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            out = Nested.apply(inner, ctx.depth - 1, ctx.place)
            ctx.place([x, inner])
            out.sum().backward()
        return grad * inner.grad, None, None


def reentrant_to_depth_70(place: Place) -> Any:
    x, _ = leaves()
    Nested.apply(x, 70, place).sum().backward()
    return x.grad


def hooks_that_page_out(place: Place) -> Any:
    module, x, place = model(), torch.randn(4, 6), where_allowed(place)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: place([p, p.grad]))
    for layer in module:
        layer.register_forward_hook(lambda _, given, out: place([*given, out]))
        layer.register_full_backward_hook(lambda _, __, grads: place([grads[0]]))
    hidden = module[:3](x)
    hidden.register_hook(lambda grad: place([grad]))
    module[3:](hidden).sum().backward()
    return [parameter.grad for parameter in module.parameters()]


def saved_tensors_hooks(place: Place) -> Any:
    x, w = leaves()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        where_allowed(place)([tensor])
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = (torch.tanh(x @ w) * w).sum()
    out.backward()
    return x.grad, w.grad


def saved_on_cpu(place: Place) -> Any:
    x, w = leaves()
    with torch.autograd.graph.save_on_cpu():
        out = (torch.tanh(x @ w) * w).sum()
    place([x, w])
    out.backward()
    return x.grad, w.grad


def mutation_allowed_on_saved_tensors(place: Place) -> Any:
    x, w = leaves()
    place([x, w])  # paging may not begin inside
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        hidden = x @ w
        out = hidden.sin()
        place([x, w, hidden, out])
        beside = [torch.zeros_like(hidden) for _ in range(8)]  # where it was
        hidden.mul_(0.5)
        (out.cos() + hidden).sum().backward()
    return beside, hidden, x.grad, w.grad


def anomaly_mode(place: Place) -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        return backward_after_forward(place)


def parameters_swapped(place: Place) -> Any:
    module, x = model().eval(), torch.randn(4, 6)
    place(everything_of(module))
    module[0].weight = torch.nn.Parameter(module[0].weight.detach() * 2)
    module[4].weight.data = torch.ones(2, 12)
    place(everything_of(module))
    torch.nn.utils.parametrizations.weight_norm(module[4])
    place(everything_of(module))
    out = module(x)
    place(everything_of(module))
    out.sum().backward()
    return out, [parameter.grad for parameter in module.parameters()]


def gradients_clipped(place: Place) -> Any:
    module, x = model(), torch.randn(4, 6)
    module(x).sum().backward()
    place(everything_of(module))
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    vector = torch.nn.utils.parameters_to_vector(module.parameters())
    place([vector, *everything_of(module)])
    torch.nn.utils.vector_to_parameters(vector * 2, module.parameters())
    return norm, everything_of(module)


def mixed_precision(place: Place) -> Any:
    module, x = model(), torch.randn(4, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = module[0](x)
        place([x, hidden, *module.parameters()])
        out = module[1:](hidden)
    place([out, *module.parameters()])
    out.float().sum().backward()
    return out, [parameter.grad for parameter in module.parameters()]


def vmapped(place: Place) -> Any:
    x, w = (tensor.detach() for tensor in leaves())
    place([x, w])
    return torch.vmap(lambda row: torch.vmap(torch.dot, (None, 0))(row, w))(x)


def transformed(name: str) -> Step:
    def run(place: Place) -> Any:
        x, w = (tensor.detach() for tensor in leaves())

        def loss(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ w).pow(2).sum()

        place([x, w])
        if name == "jvp":
            return torch.func.jvp(loss, (x,), (w,))
        if name == "vjp":
            out, pull = torch.func.vjp(loss, x)
            place([x, w, out])
            return pull(torch.ones(()))
        transform: Callable[..., Any] = getattr(torch.func, name)
        return transform(loss)(x)

    return run


def gradients_of_each_sample(place: Place) -> Any:
    module, x = model().eval(), torch.randn(4, 6)
    parameters = dict(module.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, parameters, (row,)).sum()

    place([x, *parameters.values()])
    return torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)


def functionalized(place: Place) -> Any:
    x, w = (tensor.detach() for tensor in leaves())

    def change(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[0].mul_(2)
        return y.add_(w)

    place([x, w])
    return torch.func.functionalize(change)(x)


PROGRAMS: dict[str, Step] = {
    step.__name__: step
    for step in (
        backward_after_forward,
        gradients_out_between_backwards,
        retained_graph,
        double_backward,
        forward_mode,
        custom_function,
        reentrant_to_depth_70,
        hooks_that_page_out,
        saved_tensors_hooks,
        saved_on_cpu,
        mutation_allowed_on_saved_tensors,
        anomaly_mode,
        parameters_swapped,
        gradients_clipped,
        mixed_precision,
        vmapped,
        gradients_of_each_sample,
        functionalized,
    )
} | {
    "checkpoint_reentrant": checkpointed(True),
    "checkpoint_not_reentrant": checkpointed(False),
    **{f"func_{name}": transformed(name) for name in ("grad", "jvp", "vjp", "jacrev", "jacfwd", "hessian")},
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_that_pages_on_its_way_is_bit_equal(program: str, state: str, paged: ModuleType) -> None:
    run = PROGRAMS[program]
    torch.manual_seed(1)
    plain = snapshot(run(STATES["plain"]))
    torch.manual_seed(1)
    assert snapshot(run(STATES[state])) == plain


# --- versions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_paging_leaves_the_version_counter_alone(state: str, paged: ModuleType) -> None:
    tensor = torch.randn(5)
    tensor.add_(1)
    before = tensor._version
    STATES[state]([tensor])
    round_trip([tensor])
    tensor.sum()
    assert tensor._version == before
    tensor.add_(1)
    assert tensor._version == before + 1


@pytest.mark.parametrize("state", STATES)
def test_saved_tensor_modified_while_out_still_raises(state: str, paged: ModuleType) -> None:
    x = torch.randn(5, requires_grad=True)
    hidden = x * 2
    out = hidden.pow(2).sum()
    STATES[state]([x, hidden, out])
    with torch.no_grad():
        hidden.add_(1)
    STATES[state]([x, hidden, out])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("state", STATES)
def test_leaf_that_requires_grad_still_refuses_to_be_modified(state: str, paged: ModuleType) -> None:
    x = torch.randn(5, requires_grad=True)
    STATES[state]([x])
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.add_(1)


@pytest.mark.parametrize("state", STATES)
def test_graph_dropped_with_its_tensors_out_leaves_nothing(state: str, paged: ModuleType, chaos: bool) -> None:
    x, w = leaves()
    hidden = torch.tanh(x @ w)
    out = hidden.exp().sum()
    STATES[state]([x, w, hidden, out])
    del hidden, out
    round_trip([x])
    assert torch.equal(x, leaves()[0])
    assert torch.equal(w, leaves()[1])
    if not chaos:
        assert paged.stats().paged_out_bytes == 0


def begin_inside_of_allowed_mutation() -> None:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        saved = torch.randn(4096, requires_grad=True).exp()
        with pytest.raises(EnvError, match="before it is entered"):
            torch_lms.enable({"cpu": "1GiB"})
        assert not torch_lms.swap.is_enabled()
        saved.sin().sum().backward()
    torch_lms.enable({"cpu": "1GiB"})
    torch_lms.disable()


@pytest.mark.skipif(CHAOS, reason="with chaos paging begins with the import")
def test_paging_does_not_begin_where_saved_tensors_may_be_written() -> None:
    in_fresh_process(begin_inside_of_allowed_mutation)
