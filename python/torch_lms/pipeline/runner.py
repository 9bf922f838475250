"""`Pipeline`: stages on the ranks of torch.distributed, trained step by step."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_lms.errors import LmsError, PipelineError
from torch_lms.pipeline import torch_backend
from torch_lms.pipeline.boundary import Boundary, LossFunction, Microbatch
from torch_lms.pipeline.executor import Executor
from torch_lms.pipeline.liveness import Liveness
from torch_lms.pipeline.microbatches import cut_batch, name_arguments, to_device
from torch_lms.pipeline.shared_weights import SharedWeights
from torch_lms.pipeline.timeline import Timeline
from torch_lms.schedules.actions import Schedule
from torch_lms.schedules.rules import make_schedule
from torch_lms.schedules.simulation import Event
from torch_lms.stages.materialize import materialize
from torch_lms.stages.placement import find_device
from torch_lms.stages.stage import Stage

__all__ = ["Pipeline", "PipelineConfig"]

_OWN_SCHEDULES = ("gpipe", "1f1b")
_EXECUTORS = ("auto", "torch", "own")
_NOTICE_S = 2.0
_TARGET = "target of the loss"


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a pipeline runs.

    Attributes:
        schedule: ``gpipe``, ``1f1b``, ``interleaved`` or ``zero_bubble``.
        microbatches: that a step's batch is cut into.
        executor: ``torch`` for torch.distributed.pipelining, ``own`` for the executor here, which knows ``gpipe`` and
            ``1f1b``; ``auto`` takes the first where there is one.
        seed: microbatch k of step n draws its random numbers from ``seed + n * microbatches + k``, on all stages as on
            one device; None leaves the generators of each rank alone.
        whole: names of arguments that each microbatch gets uncut.
        grace_s: how long a rank may stay in a wait that the death of another will never end.

    Raises:
        ValueError: for an unknown schedule or executor, or numbers that are not positive.
    """

    schedule: str = "1f1b"
    microbatches: int = 1
    executor: str = "auto"
    seed: int | None = None
    whole: tuple[str, ...] = ()
    grace_s: float = 20.0

    def __post_init__(self) -> None:
        if self.schedule not in torch_backend.SCHEDULES:
            known = ", ".join(torch_backend.SCHEDULES)
            raise ValueError(f"expected a schedule among {known}, found {self.schedule!r}; choose one of these")
        if self.executor not in _EXECUTORS:
            raise ValueError(f"expected an executor among {', '.join(_EXECUTORS)}, found {self.executor!r}; choose one")
        if self.microbatches < 1 or self.grace_s <= 0:
            raise ValueError(
                f"expected positive microbatches and grace, found {self}; give at least 1 and some seconds"
            )

    @property
    def uses_torch(self) -> bool:
        """Whether torch.distributed.pipelining runs it.

        Raises:
            PipelineError: if it has to and is not there.
        """
        available = torch_backend.is_available()
        if not available and (self.executor == "torch" or self.schedule not in _OWN_SCHEDULES):
            raise PipelineError(
                f"expected torch.distributed.pipelining for {self.schedule}, found none in torch {torch.__version__}; "
                f"take executor='own' and a schedule among {', '.join(_OWN_SCHEDULES)}"
            )
        if self.executor == "own" and self.schedule not in _OWN_SCHEDULES:
            raise PipelineError(
                f"expected gpipe or 1f1b for executor='own', found {self.schedule!r}; choose one of these"
            )
        return available and self.executor != "own"


class Pipeline:
    """Trains stages, one process for each rank; all ranks make it and call it alike.

        with Pipeline(stages, loss=cross_entropy, config=PipelineConfig(microbatches=8)) as pipeline:
            optimizer = torch.optim.AdamW(pipeline.parameters())
            for ids, targets in batches:
                loss = pipeline.step(ids, target=targets)  # on the last rank a tensor, elsewhere None
                optimizer.step()
                optimizer.zero_grad()

    Stage s runs on rank ``s % ranks``. A rank gives `step` at least the arguments that its own stages use, and the last
    one the target.

    Args:
        stages: all stages of the model; this rank materialises its own.
        device: of this rank; by default its CUDA device under NCCL, else the CPU.
        loss: takes what the model returns and the target; None if the model returns its loss.
        config: schedule and microbatches.
        state_dict: of the whole model, for stages on the meta device or to begin from.
        init_fn: initialises modules that are on the meta device, see `materialize`.

    Raises:
        PipelineError: if torch.distributed is not initialised, numbers do not fit, or any rank fails.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        device: Any = None,
        loss: LossFunction | None = None,
        config: PipelineConfig | None = None,
        state_dict: Mapping[str, Any] | None = None,
        init_fn: Callable[[nn.Module], None] | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise PipelineError(
                "expected torch.distributed to be initialised, found it is not; start with torchrun and call "
                "torch.distributed.init_process_group first"
            )
        self.config = config or PipelineConfig()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._arguments = stages[0].arguments
        self._control = dist.new_group(backend="gloo") if dist.get_backend() != "gloo" else dist.group.WORLD
        self._step, self._closed = 0, False
        self._backend: Executor | torch_backend.TorchBackend | None = None
        with self._agreement():
            self.device = find_device(device if device is not None else _default_device())
            self._schedule = self._check_numbers(len(stages))
            self.stages = [stage for stage in stages if stage.index % self.ranks == self.rank]
            for stage in self.stages:
                materialize(stage, self.device, state_dict=state_dict, init_fn=init_fn)
        self._boundaries = [
            Boundary(stage, self.device, loss, self.config.microbatches, self.config.seed is not None)
            for stage in self.stages
        ]
        self._has_loss_function = loss is not None
        self._stage_count = len(stages)
        self._timeline = Timeline(self.device)
        self._groups = (dist.new_group(), dist.new_group())
        self._liveness = Liveness(self._control, self.config.grace_s, self._abort_transports)
        atexit.register(_close_at_exit, weakref.ref(self))
        rank_of = {stage.index: stage.index % self.ranks for stage in stages}
        self._shared = SharedWeights(stages, self.stages, rank_of, self._groups[0], self._liveness)
        with self._watched():
            self._shared.share_values()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        return nn.ModuleList(self.stages).parameters()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the model's state dict; `merge_state_dicts` puts the parts together."""
        return {name: value for stage in self.stages for name, value in stage.state_dict().items()}

    @property
    def schedule(self) -> Schedule:
        """What each rank does, as data."""
        known = self._backend.schedule if self._backend is not None else self._schedule
        if known is None:
            raise PipelineError(
                f"expected a step before the order of {self.config.schedule} is known, found none; do one"
            )
        return known

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor | None:
        """Forward and backward of one batch; gradients add to those that are there.

        Args:
            args: arguments of the model, which are cut into microbatches along their first dimension.
            target: for the loss function, on the last rank.
            kwargs: more arguments of the model.

        Returns:
            The mean of the microbatches' losses on the last stage's rank, None elsewhere.

        Raises:
            PipelineError: for arguments that do not fit, or if a rank fails; the message names it.
        """
        with self._watched():
            microbatches = self._cut(args, kwargs, target)
            if self._backend is None:
                self._backend = self._prepare(microbatches[0])
            backend = self._backend
            for boundary in self._boundaries:
                boundary.load(microbatches)
            self._shared.set_gradients_aside()
            self._timeline.start()
            losses = backend.step()
            self._shared.sum_gradients()
            self._step += 1
            return torch.stack([loss.reshape(()) for loss in losses]).sum() if losses else None

    def measured(self, *args: Any, target: Any = None, **kwargs: Any) -> list[Event]:
        """Does a `step` and returns when each action of each rank ran, on all ranks."""
        self._timeline.enabled = True
        try:
            with self._watched():
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                self._liveness.run(lambda: dist.barrier(group=self._control))
            self.step(*args, target=target, **kwargs)
            gathered: list[Any] = [None] * self.ranks
            with self._watched():
                own = self._timeline.events(self.rank)
                self._liveness.run(lambda: dist.all_gather_object(gathered, own, group=self._control))
        finally:
            self._timeline.enabled = False
        return sorted(
            (event for events in gathered for event in events), key=lambda event: (event.start_us, event.rank)
        )

    def close(self) -> None:
        """Says goodbye to the other ranks; they may end before or after this one."""
        if not self._closed:
            self._closed = True
            self._liveness.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._liveness.announce(f"failed: {_told(error)}")
        self.close()

    def _check_numbers(self, stages: int) -> Schedule | None:
        config = self.config
        if stages % self.ranks or stages < self.ranks:
            raise PipelineError(
                f"expected a number of stages that the {self.ranks} ranks divide, found {stages}; "
                "partition into another number, or start another number of processes"
            )
        if config.uses_torch and config.schedule == "zero_bubble":
            return None
        return make_schedule(config.schedule, ranks=self.ranks, stages=stages, microbatches=config.microbatches)

    def _cut(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> list[Microbatch]:
        values = name_arguments(self._arguments, args, kwargs)
        if target is not None:
            values[_TARGET] = target
        if target is None and self._has_loss_function and self._boundaries[-1].is_last:
            raise PipelineError(
                "expected target= for the loss function on the last rank, found none; give it to step()"
            )
        needed = {name for stage in self.stages for name in stage.feeds} | (
            {_TARGET} if self._boundaries[-1].is_last else set()
        )
        own = cut_batch(values, self.config.microbatches, self.config.whole)
        first = None if self.config.seed is None else self.config.seed + self._step * self.config.microbatches
        made = []
        for index, part in enumerate(own):
            here = to_device({name: value for name, value in part.items() if name in needed}, self.device)
            made.append(Microbatch(here, here.pop(_TARGET, None), None if first is None else first + index))
        return made

    def _prepare(self, microbatch: Microbatch) -> Executor | torch_backend.TorchBackend:
        """Finds what crosses each border, stage after stage, and sets up the transport."""
        template: Any = None
        for index in range(self._stage_count):
            told: list[Any] = [None, None]
            owner = index % self.ranks
            if owner == self.rank:
                boundary = next(boundary for boundary in self._boundaries if boundary.stage.index == index)
                try:
                    told = [boundary.prepare(template, microbatch), None]
                except Exception as error:
                    told = [None, _told(error)]
                    self._send_object(told, owner)
                    raise
            self._send_object(told, owner)
            if told[1] is not None:
                raise self._liveness.blame(owner, f"failed: {told[1]}").error()
            template = told[0]
        if self.config.uses_torch:
            return torch_backend.TorchBackend(
                self._boundaries, self.config.schedule, self.ranks, self.config.microbatches, self._timeline
            )
        assert self._schedule is not None
        return Executor(self._boundaries[0], self._schedule, self._groups, self._liveness, self._timeline)

    def _send_object(self, told: list[Any], owner: int) -> None:
        self._liveness.run(lambda: dist.broadcast_object_list(told, src=owner, group=self._control))

    @contextmanager
    def _agreement(self) -> Iterator[None]:
        """All ranks go on, or all raise."""
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        told: list[Any] = [None] * self.ranks
        dist.all_gather_object(told, None if failed is None else _told(failed), group=self._control)
        if failed is not None:
            raise failed
        for rank, text in enumerate(told):
            if text is not None:
                raise PipelineError(f"expected all ranks to be ready, found that rank {rank} failed: {text}")

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Turns what follows from the death of a rank into an error that names it, and tells the others of own ones."""
        self._liveness.check()
        self._liveness.busy(True)
        try:
            yield
        except Exception as error:
            from_transport = isinstance(error, RuntimeError) and not isinstance(error, LmsError)
            failure = self._liveness.wait_for_failure(_NOTICE_S if from_transport else 0)
            self._liveness.announce(f"failed: {_told(error)}")
            if failure is not None and failure.rank != self.rank and not isinstance(error, PipelineError):
                raise failure.error() from error
            raise
        finally:
            self._liveness.busy(False)

    def _abort_transports(self) -> None:
        """Ends NCCL's waits, which nothing else does."""
        if self.device.type != "cuda":
            return
        groups: tuple[Any, ...] = (dist.group.WORLD, *self._groups)
        for group in groups:
            try:
                group._get_backend(self.device).abort()
            except (AttributeError, RuntimeError) as error:
                print(f"torch_lms: could not abort a transport: {error}", file=sys.stderr)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _default_device() -> str:
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if dist.get_backend() == "nccl" else "cpu"


def _close_at_exit(reference: weakref.ref[Pipeline]) -> None:
    pipeline = reference()
    if pipeline is None or pipeline._closed:
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        pipeline._liveness.announce(f"failed: {_told(error)}")
    pipeline.close()
