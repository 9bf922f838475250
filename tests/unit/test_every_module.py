"""PyTorch's own samples of every module and optimizer, with everything they hold paged out in between."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import torch_lms
from tests.every_op import same_tensors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_modules import ModuleInfo, module_db
    from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

pytestmark = pytest.mark.slow  # all together; and chaos adds nothing to what they do themselves

Page = Callable[[Any], None]


def page_nothing(tree: Any) -> None:
    """The plain run."""


def page_out(tree: Any) -> None:
    torch_lms.pageout(
        leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    )
    torch_lms.wait()


def fresh(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def train_once(module: torch.nn.Module, args: Any, kwargs: Any, page: Page) -> list[torch.Tensor]:
    torch.manual_seed(0)
    page((list(module.parameters()), list(module.buffers()), args, kwargs))
    outputs = [leaf for leaf in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    page(list(module.parameters()))
    scalars = [output.abs().sum() for output in outputs if output.requires_grad]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(scalars, parameters, allow_unused=True) if scalars and parameters else ()
    return outputs + [gradient for gradient in gradients if gradient is not None] + list(module.buffers())


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.formatted_name)
def test_module_whose_parameters_and_inputs_are_paged_out_is_bit_equal(info: ModuleInfo) -> None:
    if "FractionalMaxPool" in info.formatted_name:
        pytest.skip("the samples of this PyTorch do not run")
    samples = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
    for sample in samples[:2]:
        built = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        given = sample.forward_input
        if given is None:
            continue
        results = []
        for page in (page_nothing, page_nothing, page_out):
            args, kwargs = pytree.tree_map(fresh, (tuple(given.args), dict(given.kwargs)))
            results.append(train_once(copy.deepcopy(built), args, kwargs, page))
        if same_tensors(results[0], results[1]):
            assert same_tensors(results[0], results[2])


def optimized(info: OptimizerInfo, options: dict[str, Any], page: Page) -> list[torch.Tensor]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((7, 5), (5,), (3, 2, 4))]
    optimizer = info.optim_cls(parameters, **options)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
            if info.only_supports_sparse_grads:
                parameter.grad = parameter.grad.to_sparse()

        def closure() -> torch.Tensor:
            return torch.stack([parameter.square().sum() for parameter in parameters]).sum()

        page((parameters, [parameter.grad for parameter in parameters], optimizer.state_dict()))
        optimizer.step(closure if info.step_requires_closure else None)
    state = [leaf for leaf in pytree.tree_leaves(optimizer.state_dict()) if isinstance(leaf, torch.Tensor)]
    return [parameter.detach() for parameter in parameters] + state


def optimizer_cases() -> Iterator[Any]:
    for info in optim_db:
        for index, given in enumerate(info.optim_inputs_func(device="cpu")):
            for implementation in ("foreach", "fused") if index == 0 else ("",):
                if implementation and implementation not in info.supported_impls:
                    continue
                options = {**given.kwargs, implementation: True} if implementation else given.kwargs
                yield pytest.param(info, options, id=f"{info.optim_cls.__name__}-{index}{implementation}")


@pytest.mark.parametrize(("info", "options"), list(optimizer_cases()))
def test_optimizer_whose_state_is_paged_out_is_bit_equal(info: OptimizerInfo, options: dict[str, Any]) -> None:
    if info.optim_cls.__name__ == "Muon":
        pytest.skip("for matrices only")
    assert same_tensors(optimized(info, options, page_nothing), optimized(info, options, page_out))
