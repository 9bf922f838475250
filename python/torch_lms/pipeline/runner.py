"""`Pipeline`: stages on the ranks of torch.distributed, trained step by step."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from torch_lms.errors import PartitionError, PipelineError
from torch_lms.pipeline.averaging import GradientAverages
from torch_lms.pipeline.backend import Backend, make_backend
from torch_lms.pipeline.boundary import Boundary, LossFunction, Microbatch
from torch_lms.pipeline.config import PipelineConfig
from torch_lms.pipeline.data_parallel import Replicas
from torch_lms.pipeline.evaluation import evaluating, forward_all, merge_outputs
from torch_lms.pipeline.executor import Recorder, Recorders
from torch_lms.pipeline.host_values import HostValues
from torch_lms.pipeline.liveness import Liveness, end_waits, in_words
from torch_lms.pipeline.loss_scale import PipelineGradScaler
from torch_lms.pipeline.messages import Messages
from torch_lms.pipeline.microbatches import cut_batch, name_arguments, to_device
from torch_lms.pipeline.old_garbage import old_garbage_later
from torch_lms.pipeline.shared_weights import SharedWeights
from torch_lms.pipeline.states import check_receiver, gather_state, load_state, names_of
from torch_lms.pipeline.timeline import MeasuredStep, Timeline, peak_memory_bytes, reset_peak_memory
from torch_lms.pipeline.transfers import make_channels
from torch_lms.pipeline.transport import Transport, shapes_of
from torch_lms.ranks.circle import Circle
from torch_lms.ranks.members import Members, find_members, find_own_device
from torch_lms.schedules.actions import Schedule
from torch_lms.schedules.traffic import StageTimes, expected_us
from torch_lms.stages.arguments import Argument
from torch_lms.stages.materialize import materialize
from torch_lms.stages.placement import find_device
from torch_lms.stages.stage import Stage

__all__ = ["Pipeline"]

Entered = TypeVar("Entered", bound="Pipeline")

_TARGET = "target of the loss"


class Pipeline:
    """Trains stages, one process for each rank; all ranks make it and call it alike.

        with Pipeline(stages, loss=cross_entropy, config=PipelineConfig(microbatches=8)) as pipeline:
            optimizer = torch.optim.AdamW(pipeline.parameters())
            for ids, targets in batches:
                loss = pipeline.step(ids, target=targets)  # on the last rank a tensor, elsewhere None
                optimizer.step()
                optimizer.zero_grad()

    Stage s runs on rank ``s % ranks`` of the group. A rank gives `step` at least the arguments that its own stages use,
    and the last one the target.

    Several pipelines stand side by side in one world, each with its own group. With ``data_parallel`` they train one
    model: each step ends with the mean of their gradients, as `torch_lms.pipeline.data_parallel` says.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "pp"))
        Pipeline(stages, group=mesh["pp"], data_parallel=mesh["dp"])

    Under ``autocast=torch.float16`` the gradients of `step` are scaled by `scaler`, which then steps the optimizer:

        pipeline.step(ids, target=targets)  # several times, to add gradients up; the loss is not scaled
        pipeline.scaler.unscale_(optimizer)  # only to look at gradients, or to clip them
        pipeline.scaler.step(optimizer)  # on all ranks or, after an overflow on any of them, on none
        pipeline.scaler.update()
        optimizer.zero_grad()

    ``stage.compile()`` of those in `stages`, before the first step, compiles them.

    If a rank fails or dies, all others raise a PipelineError that names it; see `torch_lms.pipeline.liveness` for how
    soon, and for what is left to the timeout of the process group and to torchrun.

    Args:
        stages: all stages of the model; this rank materialises its own.
        group: the ranks: a process group or a DeviceMesh of one dimension; by default the world.
        data_parallel: the ranks with the same stages in other pipelines, likewise.
        device: of this rank; by default its CUDA device under NCCL, else the CPU.
        loss: takes what the model returns and the target; None if the model returns its loss, or an output with a
            ``loss``.
        config: schedule, microbatches and autocast.
        state_dict: of the whole model, for stages on the meta device or to begin from.
        init_fn: initialises modules that are on the meta device, see `materialize`.

    Attributes:
        stages: of this rank.
        rank: place of this rank in the pipeline.
        ranks: how many there are.
        scaler: the loss scale of float16, a `torch.amp.GradScaler` which all ranks use alike; has a state dict of its
            own, the same on all ranks. None under other types.

    Raises:
        PipelineError: if torch.distributed is not initialised, numbers do not fit, or any rank fails.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        group: Any = None,
        data_parallel: Any = None,
        device: Any = None,
        loss: LossFunction | None = None,
        config: PipelineConfig | None = None,
        state_dict: Mapping[str, Any] | None = None,
        init_fn: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.config = config or PipelineConfig()
        self._members = find_members(group, "group")
        replicas = None if data_parallel is None else find_members(data_parallel, "data_parallel")
        self.rank, self.ranks = self._members.place, self._members.count
        self._arguments, self._stage_count, self._names = stages[0].arguments, len(stages), names_of(stages)
        _check_whole(self.config.whole, self._arguments)
        self._step, self._evaluations, self._has_loss_function = 0, 0, loss is not None
        self._replica = (0, 1) if replicas is None else (replicas.place, replicas.count)
        self._connect(replicas, find_own_device(self._members, device))
        try:
            with self._agreement():
                self.device = find_device(self._given_device)
                self._schedule = self.config.find_schedule(self.ranks, len(stages))
                self.stages = [stage for stage in stages if stage.index % self.ranks == self.rank]
                for stage in self.stages:
                    materialize(stage, self.device, state_dict=state_dict, init_fn=init_fn)
            with self._liveness.watched():
                self._begin(stages, replicas, loss)
        except BaseException:
            self._liveness.close()
            raise

    def _connect(self, replicas: Members | None, device: torch.device) -> None:
        """Finds the other ranks; from here on their failures are known."""
        self._given_device = device
        circles = [Circle(self._members, "pipeline")]
        if replicas is not None:
            circles.append(Circle(replicas, "data_parallel"))
        groups = [circle.members for circle in circles]
        self._liveness = Liveness(circles, self.config.heartbeat_timeout_s, partial(end_waits, groups, device))
        self._messages = Messages(circles[0], self._liveness)
        self._replica_messages = Messages(circles[-1], self._liveness)
        weakref.finalize(self, self._liveness.close)
        atexit.register(_close_at_exit, weakref.ref(self))

    def _begin(self, stages: Sequence[Stage], replicas: Members | None, loss: LossFunction | None) -> None:
        """Everything that needs the stages on their devices."""
        config = self.config
        self._host_values = HostValues(self._messages, self.ranks)
        make = partial(
            Boundary,
            host_values=self._host_values,
            carries_random=config.seed is not None,
            autocast=config.autocast,
        )
        self._boundaries = [make(stage, self.device, loss, config.microbatches) for stage in self.stages]
        self.scaler: PipelineGradScaler | None = None
        if config.autocast is torch.float16:
            self.scaler = PipelineGradScaler(self._members, self.device, self._liveness)
        self._timeline = Timeline(self.device)
        self._members.meet(self.device)
        self._channels = make_channels(self._members)
        # The first rank's, since all have to order their transfers alike.
        duration_us = expected_us(self._messages.gather(_expected_times_us(stages))[0])
        rank_of = {stage.index: stage.index % self.ranks for stage in stages}
        self._shared = SharedWeights(stages, self.stages, rank_of, self._channels[2])
        self._replicas = None if replicas is None else Replicas(replicas, self.stages, self._replica_messages)
        self._averages = None if replicas is None else self._make_averages(replicas)
        recorder: Recorder = self._timeline if self._averages is None else Recorders(self._timeline, self._averages)
        # It must not know this pipeline: what is in a circle lives on, and holds its process groups.
        backend = partial(
            make_backend,
            config,
            self._schedule,
            self._members,
            self._boundaries,
            duration_us,
            self._channels[:2],
            recorder,
        )
        self._transport = Transport(self._boundaries, self._members, self._messages, self._channels[2], backend)
        self._share_values()

    def _make_averages(self, replicas: Members) -> GradientAverages:
        return GradientAverages(
            replicas,
            self.stages,
            self.device,
            microbatches=self.config.microbatches,
            bucket_bytes=self.config.bucket_bytes,
            last=self._shared.sums(),
            without=self._shared.copies(),
        )

    def _share_values(self) -> None:
        self._shared.share_values()
        if self._replicas is not None:
            self._replicas.share_values()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        return nn.ModuleList(self.stages).parameters()

    def state_dict(self, *, full: bool = False, to: int | None = None) -> dict[str, Any]:
        """The model's state dict, or this rank's part of it, under the model's names.

        The parts go through torch.distributed.checkpoint as they are, and may be loaded into another number of stages:
        ``checkpoint.load(state := pipeline.state_dict(), ...)``, then ``pipeline.load_state_dict(state)``.

        Args:
            full: whether to gather the whole, on the CPU; all ranks of the pipeline then call it alike.
            to: place of the only rank that gets the whole; the others get nothing. By default all get it.

        Raises:
            PipelineError: for a place that no rank has, or one without ``full``; or if a rank fails.
        """
        check_receiver(full, to, self.ranks)
        own = {name: value for stage in self.stages for name, value in stage.state_dict().items()}
        if not full:
            return own
        with self._liveness.watched():
            return gather_state(own, self._members, self._messages, self.device, to, self._names)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Copies values into this rank's stages; all ranks of the pipeline, and of data parallel, call it alike.

        Args:
            state_dict: of the whole model, or this rank's part.
            strict: whether names that are missing, or that the model has not, are errors.

        Raises:
            PipelineError: for such names, or for a value of another shape; on all ranks, which may go on.
        """
        self._liveness.check()
        with self._agreement():
            load_state(self.stages, state_dict, self._names, strict)
        with self._liveness.watched():
            self._share_values()

    @property
    def schedule(self) -> Schedule:
        """What each rank does, as data."""
        known = self._transport.schedule or self._schedule
        if known is None:
            raise PipelineError(
                f"expected a step before the order of {self.config.schedule} is known, found none; do one"
            )
        return known

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor | None:
        """Forward and backward of one batch; gradients add to those that are there.

        Several steps may so come before one of the optimizer. With data parallel each replica gives its own part of the
        batch, and gradients are those of the mean of the parts' losses. Batches may have other shapes than those
        before, such as another length; see Note [Shapes of a step] in ``transport``.

        Args:
            args: arguments of the model, which are cut into microbatches along their first dimension.
            target: for the loss function, on the last rank.
            kwargs: more arguments of the model.

        Returns:
            The mean of the microbatches' losses on the last stage's rank, None elsewhere; that of this replica.

        Raises:
            PipelineError: for arguments that do not fit, or if a rank fails; the message names it.
        """
        try:
            with self._liveness.watched():
                microbatches = self._cut(args, kwargs, target, seed=self.config.seed)
                self._check_target(target)
                shapes = tuple(self._messages.gather(shapes_of(microbatches[0].feeds)))
                self._host_values.start(f"values/{self._messages.gathers}")
                backend = self._transport.take(shapes, microbatches[0])
                with old_garbage_later():
                    losses = self._run(backend, microbatches)
        except BaseException:
            if self._averages is not None:
                self._averages.abandon()
            raise
        self._step += 1
        return _sum(losses)

    def _run(self, backend: Backend, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        """A step's actions, and all that gradients need after them; returns the losses of this rank."""
        scale = None if self.scaler is None else self.scaler.as_tensor()
        for boundary in self._boundaries:
            boundary.load(microbatches, scale)
        self._shared.set_gradients_aside()
        if self._averages is not None:
            self._averages.start()
        self._timeline.start()
        losses = backend.step()
        self._shared.sum_gradients()
        if self._averages is not None:
            self._averages.finish()
        self._shared.copy_gradients()
        return losses

    def evaluate(self, *args: Any, target: Any = None, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Forward of one batch without gradients, with all stages in evaluation mode; their modes are put back.

        Args:
            args: arguments of the model, as for `step`.
            target: for the loss function, on the last rank; may be left out if only outputs are asked for.
            return_outputs: whether to give what the model returns as well.
            kwargs: more arguments of the model.

        Returns:
            On the last stage's rank the mean of the microbatches' losses, as `step` does; None elsewhere. With
            ``return_outputs`` that and the outputs, whose microbatches follow each other along the first dimension.

        Raises:
            PipelineError: for arguments that do not fit, or if a rank fails; the message names it.
        """
        with self._liveness.watched():
            microbatches = self._cut(args, kwargs, target, seed=None)
            if not return_outputs:
                self._check_target(target)
            self._evaluations += 1
            where = self._channels[2], self._messages, f"evaluation/{self._evaluations}"
            self._host_values.start(f"{where[-1]}/values")
            with evaluating(self.stages):
                outputs = forward_all(self._boundaries, self.rank, self.ranks, microbatches, *where)
                losses: list[torch.Tensor] = []
                if not self._has_loss_function or target is not None:
                    losses = [
                        self._boundaries[-1].loss_of(output, microbatch)
                        for output, microbatch in zip(outputs, microbatches, strict=False)
                    ]
            return (_sum(losses), merge_outputs(outputs) if outputs else None) if return_outputs else _sum(losses)

    def measured(self, *args: Any, target: Any = None, **kwargs: Any) -> MeasuredStep:
        """Does a `step` and returns, on all ranks, when each action ran and the most memory that each device held.

        On CUDA it resets PyTorch's peak statistics of the device.
        """
        self._timeline.enabled = True
        try:
            with self._liveness.watched():
                self._members.meet(self.device)
            reset_peak_memory(self.device)
            self.step(*args, target=target, **kwargs)
            with self._liveness.watched():
                own = self._timeline.events(self.rank)
                gathered = self._messages.gather((own, peak_memory_bytes(self.device)))
        finally:
            self._timeline.enabled = False
        events = sorted((event for own, _ in gathered for event in own), key=lambda event: (event.start_us, event.rank))
        return MeasuredStep(events=tuple(events), peak_memory_bytes=tuple(peak for _, peak in gathered))

    def close(self) -> None:
        """Says goodbye to the other ranks; they may end before or after this one."""
        self._liveness.close()

    def __enter__(self: Entered) -> Entered:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._liveness.announce(f"failed: {in_words(error)}")
        self.close()

    def _check_target(self, target: Any) -> None:
        if target is None and self._has_loss_function and self._boundaries[-1].is_last:
            raise PipelineError(
                "expected target= for the loss function on the last rank, found none; give it to step()"
            )

    def _cut(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, seed: int | None) -> list[Microbatch]:
        values = name_arguments(self._arguments, args, kwargs)
        if target is not None:
            values[_TARGET] = target
        needed = {name for stage in self.stages for name in stage.feeds} | (
            {_TARGET} if self._boundaries[-1].is_last else set()
        )
        own = cut_batch(values, self.config.microbatches, self.config.whole)
        replica, replicas = self._replica
        first = None if seed is None else seed + (self._step * replicas + replica) * self.config.microbatches
        made = []
        for index, part in enumerate(own):
            here = to_device({name: value for name, value in part.items() if name in needed}, self.device)
            made.append(Microbatch(here, here.pop(_TARGET, None), None if first is None else first + index, index))
        try:
            for stage in self.stages:
                stage.check_shapes(made[0].feeds)
        except PartitionError as error:
            raise PipelineError(str(error)) from error
        return made

    @contextmanager
    def _agreement(self) -> Iterator[None]:
        """All ranks go on, or all raise."""
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        told = self._messages.gather(None if failed is None else in_words(failed))
        if failed is not None:
            raise failed
        for rank, text in zip(self._members.ranks, told, strict=False):
            if text is not None:
                raise PipelineError(f"expected all ranks to be ready, found that rank {rank} failed: {text}")


def _check_whole(whole: Sequence[str], arguments: Sequence[Argument]) -> None:
    """Looks whether the model has arguments of these names."""
    known = {name: None for argument in arguments for name in (argument.name, *argument.parts)} | {_TARGET: None}
    unknown = [name for name in whole if name not in known]
    if unknown:
        raise PipelineError(
            f"expected names of arguments in whole, among {', '.join(known)}, found {unknown[0]!r}; leave it out"
        )


def _expected_times_us(stages: Sequence[Stage]) -> StageTimes | None:
    """Of each stage, where a partition has predicted them."""
    partition = getattr(stages, "partition", None)
    return None if partition is None else partition.figures.times_us


def _sum(losses: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return torch.stack([loss.reshape(()) for loss in losses]).sum() if losses else None


def _close_at_exit(reference: weakref.ref[Pipeline]) -> None:
    pipeline = reference()
    if pipeline is None:
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        pipeline._liveness.announce(f"failed: {in_words(error)}")
    pipeline.close()
