"""What an optimizer does, found out by trying it on small matrices."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from torch_lms.chunk.values import Change, Copies, stand_in, step_without_hooks, take_over
from torch_lms.swap.link import wait_for_device

__all__ = [
    "keys_in_shape",
    "moves_what_it_is_given",
    "state_bytes_each",
    "takes_new_tensors",
    "treats_each_element_alone",
    "treats_each_tensor_alone",
    "update_seconds",
]

_SHAPE = (4, 6)
_PIECE = 7
_TIMED_STEPS = 3
_STEPS = 4  # what one tensor has to do with another may begin with what both have gone by the second step
_LEAST_RATE = 1e-2  # a schedule may begin with none, and nothing would move
_LARGE = 1e3  # a gradient beside which another hardly counts in their norm
_CLOSE = 2e-2  # an optimizer may compute with both tensors in one, which rounds otherwise
_ROUNDING = 1e-6  # of the numbers themselves


def treats_each_element_alone(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether pieces of a matrix become what they become in it, in some steps; False if it cannot be tried."""
    (start,), *gradients = _tries([_SHAPE], device)
    for group in optimizer.param_groups:
        whole, pieces = [start.clone()], [one.clone() for one in start.flatten().split(_PIECE)]
        try:
            _steps(optimizer, group, whole, gradients)
            _steps(optimizer, group, pieces, [one.flatten().split(_PIECE) for (one,) in gradients])
        except Exception:
            return False
        if not torch.equal(whole[0].flatten(), torch.cat(pieces)):
            return False
    return True


def takes_new_tensors(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether it knows a tensor by its state alone: not by the object, as one does that has a dict of its own for that.

    True if it cannot be tried.
    """
    (start,), *gradients = _tries([_SHAPE], device)
    for group in optimizer.param_groups:
        same, new = [start.clone()], [start.clone()]
        try:
            _steps(optimizer, group, same, gradients)
        except Exception:
            continue
        try:
            _steps(optimizer, group, new, gradients, partial(_step_on_others, used=[]))
        except Exception:
            return False
        if not torch.equal(same[0], new[0]):
            return False
    return True


def moves_what_it_is_given(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> bool:
    """Whether steps change anything of a matrix with gradients; True if it cannot be tried.

    Nor is one that knows parameters by name: it may leave the first one alone.
    """
    if group.get("param_names"):
        return True
    (start,), *gradients = _tries([_SHAPE], device)
    tensors = [start.clone()]
    try:
        _steps(optimizer, group, tensors, gradients)
    except Exception:
        return True
    return not torch.equal(tensors[0], start)


def treats_each_tensor_alone(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> bool:
    """Whether two tensors of a group go where one goes alone, and both in steps of their own, as those of chunks are.

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
    starts, *gradients = _tries(shapes, device)
    for _, other in gradients:
        other.mul_(_LARGE)
    beside, apart, alone = ([one.clone() for one in starts[:count]] for count in (2, 2, 1))
    _steps(optimizer, group, beside, gradients)
    _steps(optimizer, group, apart, gradients, _step_apart)
    _steps(optimizer, group, alone, [of_step[:1] for of_step in gradients])
    return all(
        (together - one).norm() <= _CLOSE * (one - start).norm() + _ROUNDING * start.norm()
        for other in (apart, alone)
        for together, one, start in zip(beside, other, starts, strict=False)
    )


def _own_shapes(group: dict[str, Any]) -> list[torch.Size]:
    """Two of those with the most dimensions that have the fewest elements: of a lone parameter, its own twice."""
    shapes = [one.shape for one in group["params"] if one.requires_grad and one.numel()]
    shapes.sort(key=lambda shape: (-len(shape), shape.numel()))
    return (shapes * 2)[:2] if len(shapes) < 2 else shapes[:2]


def state_bytes_each(optimizer: Optimizer, device: torch.device) -> int:
    """Bytes that it keeps for each element of a 32-bit tensor; 0 if it cannot be tried."""
    return sum((_kept_in_shape(optimizer, optimizer.param_groups[0], device) or {}).values())


def keys_in_shape(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> frozenset[str] | None:
    """Of what it keeps for a matrix of a group in the matrix's shape; None if it cannot be tried."""
    kept = _kept_in_shape(optimizer, group, device)
    return None if kept is None else frozenset(kept)


def _kept_in_shape(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> dict[str, int] | None:
    """By key, the bytes of each element."""
    (start,), gradients, *_ = _tries([_SHAPE], device)
    try:
        state = _steps(optimizer, group, [start], [gradients]).get(start, {})
    except Exception:
        return None
    return {
        key: value.element_size()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == start.shape
    }


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


def _tries(shapes: Sequence[Sequence[int]], device: torch.device) -> list[list[torch.Tensor]]:
    """Tensors, and their gradients in some steps, which lead one way and differ."""
    generator = torch.Generator().manual_seed(0)
    starts, ways, *rest = (
        [torch.randn(shape, generator=generator).to(device) for shape in shapes] for _ in range(2 + _STEPS)
    )
    return [starts, *([way + one for way, one in zip(ways, of_step, strict=True)] for of_step in rest)]


@torch.no_grad()
def _steps(
    optimizer: Optimizer,
    group: dict[str, Any],
    tensors: list[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
    step: Callable[[Optimizer], None] = step_without_hooks,
) -> dict[torch.Tensor, dict[str, Any]]:
    """The optimizer's state after steps on some tensors; nothing of the optimizer itself changes.

    Every step draws the same random numbers, and leaves all generators as they were.

    Args:
        optimizer: to try.
        group: of the optimizer, as which the tensors are tried.
        tensors: to update.
        gradients: in each step.
        step: makes one; the optimizer's own if left out.
    """
    copies = Copies(with_generators=True)
    tried = stand_in(optimizer, [(group, tensors)], copies)
    tried.state = defaultdict(dict)
    _set_rate(tried.param_groups[0], tried.defaults)
    device, own = tensors[0].device, [(one, one.get_state()) for one in copies.generators()]
    for of_step in gradients:
        for tensor, gradient in zip(tensors, of_step, strict=True):
            tensor.grad = gradient.clone()
        for generator, state in own:
            generator.set_state(state)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            step(tried)
    return tried.state


def _step_apart(tried: Optimizer) -> None:
    """As several steps, of one tensor each, as those of chunks are: see Note [What a step counts]."""
    changes: list[Change] = []
    (group,) = tried.param_groups
    for tensor in group["params"]:
        copies = Copies(tried.state)
        step_without_hooks(stand_in(tried, [(group, [tensor])], copies))
        changes += copies.changes()
    take_over(changes)


def _step_on_others(tried: Optimizer, used: list[torch.Tensor]) -> None:
    """On other tensors with the same values and state, as a step that streams.

    Args:
        tried: the optimizer.
        used: keeps these tensors, so that the next step's are other objects.
    """
    (group,) = tried.param_groups
    given, others = group["params"], [one.clone() for one in group["params"]]
    for tensor, other in zip(given, others, strict=True):
        other.grad = tensor.grad
        tried.state[other] = tried.state.pop(tensor, {})
    group["params"] = list(others)
    step_without_hooks(tried)
    for tensor, other in zip(given, others, strict=True):
        tensor.copy_(other)
        tried.state[tensor] = tried.state.pop(other)
    group["params"] = given
    used += others


def _set_rate(group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """To that at which it is to learn: an optimizer may find it out by what has been gone at that of its own."""
    given = [group.get("lr"), group.get("initial_lr"), defaults.get("lr")]
    rates = [float(one) for one in given if isinstance(one, float | int | torch.Tensor)]
    if isinstance(rate := group.get("lr"), torch.Tensor):
        group["lr"] = torch.full_like(rate, max([_LEAST_RATE, *rates]))
    elif rate is not None:
        group["lr"] = max([_LEAST_RATE, *rates])
