"""Which nodes of a graph draw random numbers: their order is part of what a model computes."""

from __future__ import annotations

from torch import fx, nn

from torch_lms.profile.aliases import DROPOUTS, Modules, name_of, option_of
from torch_lms.profile.hooks import is_pytorchs

__all__ = ["draws"]

_DRAWING = DROPOUTS | frozenset(
    [
        "native_dropout",
        "rand",
        "randn",
        "randint",
        "rand_like",
        "randn_like",
        "randint_like",
        "randperm",
        "bernoulli",
        "normal",
        "uniform",
        "exponential",
        "geometric",
        "cauchy",
        "log_normal",
        "random",
        "multinomial",
        "poisson",
        "binomial",
        "rrelu",
        "rrelu_with_noise",
        "gumbel_softmax",
        "_standard_gamma",
        "_sample_dirichlet",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d_with_indices",
    ]
)
_ATTENTION = frozenset(["scaled_dot_product_attention", "multi_head_attention_forward"])
_DROPOUT_PLACE = 4  # of scaled_dot_product_attention, which has no signature
_DRAWING_MODULES = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def draws(node: fx.Node, modules: Modules) -> bool:
    """Whether it does, in training at least. What is not known from PyTorch counts as if it did.

    Args:
        node: of a graph.
        modules: of its model, by path.
    """
    if node.op == "call_module":
        module = modules.get(str(node.target))
        return module is not None and _module_draws(module)
    if node.op not in ("call_function", "call_method"):
        return False
    name = name_of(node.target).rstrip("_")
    if name in _ATTENTION:
        by_place = node.args[_DROPOUT_PLACE] if len(node.args) > _DROPOUT_PLACE else 0.0
        return bool(option_of(node, ("dropout_p",), by_place) != 0)
    return name in _DRAWING and not (name in DROPOUTS and option_of(node, ("p",), 0.5) == 0)


def _module_draws(module: nn.Module) -> bool:
    told = getattr(module, "draws", None)  # of a part of a graph
    if isinstance(told, bool):
        return told
    if isinstance(module, fx.GraphModule):
        inside = dict(module.named_modules(remove_duplicate=False))
        return any(draws(node, inside) for node in module.graph.nodes)
    if not all(map(is_pytorchs, module.modules())):
        return True
    for one in module.modules():
        rate = getattr(one, "p" if isinstance(one, nn.modules.dropout._DropoutNd) else "dropout", 0.0)
        if isinstance(one, _DRAWING_MODULES) or (isinstance(rate, float) and rate != 0):
            return True
    return False
