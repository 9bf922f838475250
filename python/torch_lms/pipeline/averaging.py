"""Means of gradients over replicas, taken while backward still runs.

Note [When gradients are final]: in a stage's last backward of a step each gradient is final once PyTorch has added it
to ``grad``. A bucket of them begins its all-reduce when all are, and the next gradient has come, so that the program's
own hooks have seen them. What is left begins when the action ends: parameters that got no gradient, and all of a stage
whose last action is zero bubble's backward of weights, which adds without hooks, as does PyTorch before 2.1. Weights
that several stages share are final when the stages have added up theirs, after all actions.

Note [One order for all]: the buckets of a stage are made of its trained parameters, last ones first, and begin in this
order whichever gradients come first; stages end in the order of the schedule. So all replicas reduce alike, although
not all need have the same gradients: a missing one counts as zero, and beside each gradient goes a number that is not
zero where there is one. A parameter that no replica has a gradient for stays without.

Note [Memory]: what is reduced is a copy, so that gradients may be paged out meanwhile, which tensors of collectives may
not. Copies go as soon as one is found to have ended while another begins; at most they are all gradients of the rank,
as they were when all began after the last action, but beside what the last backwards still keep.

Note [Bits]: a gradient is divided by the number of replicas and then summed in the order of the backend's all-reduce.
All replicas get the same bits. With two there is one order, whatever the buckets. With more, a ring adds in an order
that depends on the place in its bucket: bits are the same again with the same ``bucket_bytes``, not with others.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_lms.errors import PipelineError
from torch_lms.pipeline.liveness import end_waits
from torch_lms.ranks.members import Members
from torch_lms.schedules.actions import BACKWARD, WEIGHT_BACKWARD, Action
from torch_lms.stages.stage import Stage

__all__ = ["GradientAverages"]

Bucket = Sequence[nn.Parameter]


class _LastBackward:
    """A stage's last backward in a step, and its buckets."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.waiting = deque(buckets)
        self._arrived: set[int] = set()
        self._begun: set[int] = set()
        self._lacking = self._in_first()

    def _in_first(self) -> set[int]:
        return {id(one) for one in self.waiting[0]} - self._arrived if self.waiting else set()

    def has_begun(self, parameter: nn.Parameter) -> bool:
        """Whether its gradient is being reduced."""
        return id(parameter) in self._begun

    def add(self, parameter: nn.Parameter) -> None:
        """Its gradient is final."""
        self._arrived.add(id(parameter))
        self._lacking.discard(id(parameter))

    def complete(self) -> Iterator[Bucket]:
        """Takes the first buckets, as far as they are complete."""
        while self.waiting and not self._lacking:
            bucket = self.waiting.popleft()
            self._begun.update(map(id, bucket))
            self._lacking = self._in_first()
            yield bucket


@dataclass(frozen=True)
class _Running:
    bucket: Bucket
    flat: torch.Tensor
    work: Any


class GradientAverages:
    """Gives all replicas the mean of their gradients, step after step; a recorder of the step's actions.

    Args:
        members: the replicas.
        stages: of this rank, on their devices.
        device: of this rank.
        microbatches: in a step.
        bucket_bytes: of gradients that are reduced at once.
        last: identities of parameters whose gradients are final only after all actions.
        without: identities of parameters that get theirs in another way.

    Threads: on CUDA gradients arrive in a thread of autograd, while the one that runs the step waits for it.
    """

    def __init__(
        self,
        members: Members,
        stages: Sequence[Stage],
        device: torch.device,
        *,
        microbatches: int,
        bucket_bytes: int,
        last: Collection[int],
        without: Collection[int],
    ) -> None:
        self._members, self._device, self._microbatches = members, device, microbatches
        self._bucket_bytes = bucket_bytes
        taken = {*last, *without}
        self._of_stage = {
            stage.index: [one for one in stage.parameters() if id(one) not in taken][::-1] for stage in stages
        }
        self._last = [one for one in nn.ModuleList(stages).parameters() if id(one) in last and id(one) not in without]
        self._names = {id(value): name for stage in stages for name, value in stage.named_parameters()}
        self._hooked: set[int] = set()
        self._backwards: Counter[int] = Counter()
        self._in_last: _LastBackward | None = None
        self._failed: PipelineError | None = None
        self._running: deque[_Running] = deque()

    def start(self) -> None:
        """Before a step's first action."""
        self._backwards.clear()
        for parameters in self._of_stage.values():
            for one in parameters:
                if one.requires_grad and id(one) not in self._hooked and hasattr(nn.Parameter, _HOOK):
                    self._hooked.add(id(one))
                    one.register_post_accumulate_grad_hook(_hook_of(self))

    def begin(self, action: Action) -> None:
        """Before an action."""
        if action.kind == BACKWARD and self._backwards[action.stage] + 1 == self._microbatches:
            self._in_last = _LastBackward(self._buckets_of(action.stage))

    def end(self, action: Action) -> None:
        """After an action: with a stage's last one, all its gradients are final.

        Raises:
            PipelineError: for a gradient that cannot be averaged.
        """
        if self._failed is not None:
            raise self._failed
        if action.kind not in (BACKWARD, WEIGHT_BACKWARD):
            return
        self._backwards[action.stage] += 1
        if self._backwards[action.stage] == self._microbatches:
            for bucket in self._buckets_of(action.stage) if self._in_last is None else self._in_last.waiting:
                self._reduce(bucket)
            self._in_last = None

    def finish(self) -> None:
        """After all actions, and after stages have added up what they share: all gradients are means.

        On CUDA the current stream waits for them, not the program.
        """
        for bucket in _buckets(self._last, self._bucket_bytes):
            self._reduce(bucket)
        while self._running:
            self._finish_first()

    def abandon(self) -> None:
        """After a step that has failed: nothing waits for other replicas any more, which then fail as well."""
        self._in_last, self._failed = None, None
        if self._running:
            end_waits([self._members], self._device)
            self._running.clear()

    def arrived(self, parameter: nn.Parameter) -> None:
        """A parameter's ``grad`` has been added to; `end` raises what is wrong, which PyTorch would wrap here."""
        stage = self._in_last
        if stage is None or self._failed is not None:
            return
        try:
            if stage.has_begun(parameter):
                raise PipelineError(
                    f"expected one gradient of {self._names[id(parameter)]} in a backward, found another one after its "
                    "average began; checkpoint what uses it in several places with use_reentrant=False"
                )
            for bucket in stage.complete():
                self._reduce(bucket)
        except PipelineError as error:
            self._failed = error
        stage.add(parameter)

    def _buckets_of(self, stage: int) -> Sequence[Bucket]:
        return _buckets(self._of_stage[stage], self._bucket_bytes)

    def _reduce(self, bucket: Bucket) -> None:
        """Begins to sum, and takes over what has ended, whose memory is free then."""
        while self._running and self._running[0].work.is_completed():
            self._finish_first()
        for one in bucket:
            self._check(one)
        there = bucket[0].new_ones(len(bucket), requires_grad=False)
        parts = []
        for place, one in enumerate(bucket):
            if one.grad is None:
                there[place] = 0
            parts.append(there.new_zeros(one.numel()) if one.grad is None else one.grad.reshape(-1))
        flat = torch.cat([*parts, there]).div_(self._members.count)  # before: a sum of 16-bit numbers may be too large
        work = dist.all_reduce(flat, group=self._members.group, async_op=True)
        self._running.append(_Running(bucket, flat, work))

    def _finish_first(self) -> None:
        running = self._running.popleft()
        running.work.wait()
        if running.flat.is_cuda:  # it was made in autograd's thread, whose stream may be another one
            running.flat.record_stream(torch.cuda.current_stream(running.flat.device))
        *means, there = running.flat.split([*(one.numel() for one in running.bucket), len(running.bucket)])
        lacking = any(one.grad is None for one in running.bucket)
        anywhere = there.tolist() if lacking else []  # on CUDA the program waits for these
        for place, (one, mean) in enumerate(zip(running.bucket, means, strict=True)):
            if one.grad is None and anywhere[place]:
                one.grad = torch.empty_like(one, requires_grad=False)
            if one.grad is not None:
                one.grad.copy_(mean.view(one.shape))

    def _check(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is not None and (gradient.layout, gradient.dtype) != (torch.strided, parameter.dtype):
            raise PipelineError(
                f"expected a dense gradient of {parameter.dtype} for {self._names[id(parameter)]} under data_parallel, "
                f"found one of {gradient.layout} and {gradient.dtype}; make embeddings with sparse=False"
            )


_HOOK = "register_post_accumulate_grad_hook"  # since PyTorch 2.1


def _hook_of(averages: GradientAverages) -> Callable[[Any], None]:
    found = weakref.ref(averages)  # the parameter keeps the hook, which must not keep the parameter

    def hook(parameter: Any) -> None:
        here = found()
        if here is not None:
            here.arrived(parameter)

    return hook


def _buckets(parameters: Sequence[nn.Parameter], most_bytes: int) -> list[Bucket]:
    """Trained parameters of one type together, up to a size: small ones do not each cost a round."""
    made: list[list[nn.Parameter]] = []
    room: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for one in parameters:
        if not one.requires_grad:
            continue
        size = one.numel() * one.element_size()
        bucket, used = room.get(one.dtype, ([], most_bytes))
        if used + size > most_bytes:
            bucket, used = [], 0
            made.append(bucket)
        bucket.append(one)
        room[one.dtype] = (bucket, used + size)
    return list(made)
