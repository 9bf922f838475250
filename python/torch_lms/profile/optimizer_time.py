"""What the step of an optimizer takes, measured on copies of a few parameters: `time_optimizer`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_lms.profile.optimizer_state import MakeOptimizer, make_step, trained_parameters
from torch_lms.profile.storages import tensor_bytes
from torch_lms.profile.timing import Clock

__all__ = ["time_optimizer"]

_WARMUP_STEPS, _TIMED_STEPS = 2, 5
_BATCH_BYTES = 64 << 20  # of parameters at once: more than caches hold, and little beside a model
_BATCHES = 3

_Trained = tuple[str, nn.Parameter, MakeOptimizer]


def time_optimizer(model: nn.Module, optimizer: Any, clock: Clock) -> Mapping[str, float] | None:
    """Microseconds of a step of each parameter, under its first name.

    The first parameters of each of the optimizer's groups are timed, `_BATCHES` times as many as come to
    `_BATCH_BYTES`; others take as long by their bytes.

    Args:
        model: its parameters are looked up in the optimizer.
        optimizer: as for `measure_optimizer`.
        clock: of the parameters' device.

    Raises:
        ProfileError: if it is no optimizer, or one that makes no step for copies.
    """
    if optimizer is None:
        return None
    trained = list(trained_parameters(model, optimizer))
    found: dict[str, float] = {}
    for own in _groups(trained, optimizer):
        batches = list(itertools.islice(_batches(own), _BATCHES))
        timed_bytes = sum(tensor_bytes(parameter) for batch in batches for _, parameter, _ in batch)
        rate = sum(_time_step(batch, clock) for batch in batches) / max(timed_bytes, 1)
        found |= {name: rate * tensor_bytes(parameter) for name, parameter, _ in own}
    return found


def _groups(trained: Sequence[_Trained], optimizer: Any) -> list[list[_Trained]]:
    """The parameters of each group of an optimizer; all where one is made of a list of parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return [list(trained)]
    group_of = {id(one): number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
    numbered: dict[int, list[_Trained]] = {}
    for one in trained:
        numbered.setdefault(group_of[id(one[1])], []).append(one)
    return list(numbered.values())


def _batches(trained: Sequence[_Trained]) -> Iterator[list[_Trained]]:
    """One after the other, each as small as it may be with so many bytes."""
    batch: list[_Trained] = []
    for one in trained:
        batch.append(one)
        if sum(tensor_bytes(parameter) for _, parameter, _ in batch) >= _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _time_step(batch: Sequence[_Trained], clock: Clock) -> float:
    copies = [nn.Parameter(torch.zeros_like(parameter, requires_grad=False)) for _, parameter, _ in batch]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    optimizer = make_step(batch[0][2], *copies)
    for _ in range(_WARMUP_STEPS - 1):
        optimizer.step()
    clock.lead()
    start = clock.mark()
    for _ in range(_TIMED_STEPS):
        optimizer.step()
    end = clock.mark()
    clock.wait()
    return clock.elapsed_us(start, end) / _TIMED_STEPS
