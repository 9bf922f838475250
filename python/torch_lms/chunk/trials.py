"""What an optimizer does, found out by trying it on small matrices."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torch_lms.chunk.values import with_own_tensors
from torch_lms.swap.link import wait_for_device

__all__ = ["state_bytes_each", "treats_each_element_alone", "treats_each_tensor_alone", "update_seconds"]

_SHAPE = (4, 6)
_PIECE = 7
_TIMED_STEPS = 3
_LARGE = 1e3  # a gradient beside which another hardly counts in their norm
_CLOSE = 1e-3  # an optimizer may compute with both tensors in one, which rounds otherwise


def treats_each_element_alone(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether pieces of a matrix become what they become in it, in two steps; False if it cannot be tried."""
    start, *gradients = _matrices(3, device)
    for group in optimizer.param_groups:
        whole, pieces = [start.clone()], [one.clone() for one in start.flatten().split(_PIECE)]
        try:
            _steps(optimizer, group, whole, [[one] for one in gradients])
            _steps(optimizer, group, pieces, [one.flatten().split(_PIECE) for one in gradients])
        except Exception:
            return False
        if not torch.equal(whole[0].flatten(), torch.cat(pieces)):
            return False
    return True


def treats_each_tensor_alone(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> bool:
    """Whether a tensor of a group becomes beside another what it becomes alone, in a step.

    Two small matrices are tried; of an optimizer that fails on these, two tensors like the group's smallest.

    Raises:
        Exception: what its step raises on both.
    """
    try:
        return _same_alone(optimizer, group, (_SHAPE, _SHAPE), device)
    except Exception:  # it may be right on what it is made for
        shapes = _own_shapes(group)
        return not shapes or _same_alone(optimizer, group, shapes, device)


def _same_alone(
    optimizer: Optimizer, group: dict[str, Any], shapes: Sequence[Sequence[int]], device: torch.device
) -> bool:
    starts, gradients = _tensors(shapes, device), _tensors(shapes, device, seed=1)
    gradients[1].mul_(_LARGE)
    beside = [one.clone() for one in starts]
    alone = [starts[0].clone()]
    for tensors in (beside, alone):
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            _steps(optimizer, group, tensors, [gradients[: len(tensors)]])
    return torch.allclose(beside[0], alone[0], rtol=_CLOSE)


def _own_shapes(group: dict[str, Any]) -> list[torch.Size]:
    """Two of those with the most dimensions that have the fewest elements: of a lone parameter, its own twice."""
    shapes = [one.shape for one in group["params"] if one.requires_grad and one.numel()]
    shapes.sort(key=lambda shape: (-len(shape), shape.numel()))
    return (shapes * 2)[:2] if len(shapes) < 2 else shapes[:2]


def state_bytes_each(optimizer: Optimizer, device: torch.device) -> int:
    """Bytes that it keeps for each element of a 32-bit tensor; 0 if it cannot be tried."""
    start, gradient = _matrices(2, device)
    try:
        states = _steps(optimizer, optimizer.param_groups[0], [start], [[gradient]])
    except Exception:
        return 0
    values = [value for state in states.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(value.element_size() for value in values if value.shape == start.shape)


def update_seconds(optimizer: Optimizer, numel: int, device: torch.device, dtype: torch.dtype) -> float:
    """What one update of that many elements takes a device or processor; endless if it cannot be tried.

    From 16-bit gradients to 16-bit parameters, as chunks are updated.
    """
    times = []
    try:
        parameter = torch.zeros(numel, dtype=dtype, device=device)
        tensor, gradient = torch.zeros(numel, device=device), torch.ones_like(parameter)
        for _ in range(_TIMED_STEPS):  # the first takes memory
            wait_for_device(device)
            start = time.perf_counter()
            _steps(optimizer, optimizer.param_groups[0], [tensor], [[gradient.float()]])
            parameter.copy_(tensor)
            wait_for_device(device)
            times.append(time.perf_counter() - start)
    except Exception:
        return float("inf")
    return min(times)


def _matrices(count: int, device: torch.device) -> list[torch.Tensor]:
    return _tensors([_SHAPE] * count, device)


def _tensors(shapes: Sequence[Sequence[int]], device: torch.device, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


@torch.no_grad()
def _steps(
    optimizer: Optimizer,
    group: dict[str, Any],
    tensors: list[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
) -> dict[torch.Tensor, dict[str, Any]]:
    """The optimizer's state after steps on some tensors; nothing of the optimizer itself changes."""
    tried: Optimizer = object.__new__(type(optimizer))
    vars(tried).update(with_own_tensors(vars(optimizer)))
    group = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    if "lr" in group:  # a schedule may begin with none, and nothing would move
        group["lr"] = torch.full_like(rate, 1e-2) if isinstance(rate := group["lr"], torch.Tensor) else 1e-2
    tried.param_groups = [{**group, "params": tensors}]
    tried.state = defaultdict(dict)
    step: Any = type(tried).step
    for of_step in gradients:
        for tensor, gradient in zip(tensors, of_step, strict=True):
            tensor.grad = gradient.clone()
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(tried)
    return tried.state
