"""PyTorch's own samples of every op, run with their tensors paged out and compared bit by bit with a plain run."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

import torch_lms
from tests.same_tensors import same_tensors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

__all__ = ["OpInfo", "check_forward_and_backward", "check_in_place", "name_of", "ops_of", "same_tensors"]

# What an op leaves uninitialized has no value to compare.
_UNINITIALIZED = ("empty", "new_empty")


def ops_of(device: str) -> list[OpInfo]:
    """The ops that the device has."""
    left_out = _UNINITIALIZED if device == "cuda" else (*_UNINITIALIZED, "jiterator")
    return [op for op in op_db if not op.name.startswith(left_out) and op.supported_dtypes(device)]


def name_of(op: OpInfo) -> str:
    """For test reports."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def check_forward_and_backward(op: OpInfo, device: str, *, settled: bool, most: int) -> int:
    """Compares outputs, gradients and second gradients; returns how many samples could be compared.

    Not settled: the page-outs have just been enqueued. Settled: all of them are over.
    """
    return _compare(op, device, most, lambda sample, page: _forward_and_backward(op, sample, page), settled)


def check_in_place(op: OpInfo, device: str, *, settled: bool, most: int) -> int:
    """Compares what the op's in-place variant leaves in its paged-out input."""
    if op.inplace_variant is None:
        return 0
    return _compare(op, device, most, lambda sample, page: _in_place(op, sample, page), settled)


Page = Callable[[list[torch.Tensor]], None]


def _compare(
    op: OpInfo, device: str, most: int, run: Callable[[SampleInput, Page], list[torch.Tensor]], settled: bool
) -> int:
    def page_out(tensors: list[torch.Tensor]) -> None:
        torch_lms.pageout(
            tensor for tensor in tensors if tensor.layout is torch.strided and not tensor._is_zerotensor()
        )
        if settled:
            torch_lms.wait()

    compared = 0
    for sample in _samples(op, device, most):
        try:
            plain = run(sample, lambda tensors: None)
            again = run(sample, lambda tensors: None)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            continue  # the sample is for an error, or needs what is not here
        paged = run(sample, page_out)
        if same_tensors(plain, again):  # else the op is random: that it ran must do
            assert same_tensors(plain, paged), f"{name_of(op)} of {sample} differs when paged out"
            compared += 1
    return compared


def _samples(op: OpInfo, device: str, most: int) -> Iterator[SampleInput]:
    dtype = next(iter(sorted(op.supported_dtypes(device), key=lambda dtype: (dtype is not torch.float32, str(dtype)))))
    gradients = op.supports_autograd and dtype.is_floating_point
    # Not `op.sample_inputs`, which looks through all of the stack for one of PyTorch's own tests.
    torch.manual_seed(0)
    yield from itertools.islice(op.sample_inputs_func(op, device, dtype, gradients), most)


def _copy(sample: SampleInput) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    copied: tuple[Any, tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
        copy, (sample.input, tuple(sample.args), dict(sample.kwargs))
    )
    return copied


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _forward_and_backward(op: OpInfo, sample: SampleInput, page: Page) -> list[torch.Tensor]:
    torch.manual_seed(0)
    given, args, kwargs = _copy(sample)
    inputs = _tensors((given, args, kwargs))
    page(inputs)
    outputs = _tensors(op(given, *args, **kwargs))
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    page(leaves)
    gradients = _gradients(outputs, leaves, create_graph=op.supports_gradgrad)
    page(gradients)
    second = _gradients(gradients, leaves, create_graph=False)
    return outputs + gradients + second


def _gradients(of: list[torch.Tensor], leaves: list[torch.Tensor], *, create_graph: bool) -> list[torch.Tensor]:
    scalars = [_sum(tensor) for tensor in of if tensor.requires_grad]
    if not scalars or not leaves:
        return []
    gradients = torch.autograd.grad(scalars, leaves, allow_unused=True, create_graph=create_graph)
    return [gradient for gradient in gradients if gradient is not None]


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs().sum() if tensor.is_complex() else (tensor * 1.0).sum()


def _in_place(op: OpInfo, sample: SampleInput, page: Page) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        given, args, kwargs = _copy(sample)
        view = given.view(-1) if given.is_contiguous() else given
        page(_tensors((given, args, kwargs)))
        op.inplace_variant(given, *args, **kwargs)
        page([given])
        return [given, view]
