"""`PipelineConfig`: how a pipeline runs."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

import torch

from torch_lms.errors import PipelineError
from torch_lms.partition.costs import DataParallel
from torch_lms.pipeline import torch_backend
from torch_lms.schedules.actions import Schedule
from torch_lms.schedules.rules import make_schedule

__all__ = ["PipelineConfig"]

_OWN_SCHEDULES = ("gpipe", "1f1b")
_EXECUTORS = ("auto", "torch", "own")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a pipeline runs.

    Attributes:
        schedule: ``gpipe``, ``1f1b``, ``interleaved`` or ``zero_bubble``.
        microbatches: that a step's batch is cut into.
        executor: ``torch`` for torch.distributed.pipelining, ``own`` for the executor here, which knows ``gpipe`` and
            ``1f1b``; ``auto`` takes the first where there is one.
        seed: microbatch k of step n draws its random numbers from ``seed + n * microbatches + k``, on all stages as on
            one device; None leaves the generators of each rank alone. With data parallel the microbatches of all
            replicas count, those of the first replica first.
        whole: names of arguments that each microbatch gets uncut.
        autocast: the type that stages and loss run in where ``torch.autocast`` has them do so, in training and
            evaluation, with backward outside of it as PyTorch wants: ``torch.bfloat16``, or ``torch.float16``, whose
            gradients need `Pipeline.scaler`. None leaves it to the program.
        bucket_bytes: of gradients that data parallel reduces at once: small buckets begin sooner, before the backward
            ends, and large ones cost fewer rounds.
        heartbeat_timeout_s: how long a rank may give no sign of life before it counts as dead. After an error of a
            transport some seconds are enough.

    Raises:
        ValueError: for an unknown schedule or executor, another type for autocast, or numbers that are not positive.
    """

    schedule: str = "1f1b"
    microbatches: int = 1
    executor: str = "auto"
    seed: int | None = None
    whole: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    bucket_bytes: int = DataParallel.bucket_bytes
    heartbeat_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if self.schedule not in torch_backend.SCHEDULES:
            known = ", ".join(torch_backend.SCHEDULES)
            raise ValueError(f"expected a schedule among {known}, found {self.schedule!r}; choose one of these")
        if self.executor not in _EXECUTORS:
            raise ValueError(f"expected an executor among {', '.join(_EXECUTORS)}, found {self.executor!r}; choose one")
        if self.autocast not in (None, torch.float16, torch.bfloat16):
            raise ValueError(
                f"expected torch.float16, torch.bfloat16 or None for autocast, found {self.autocast!r}; take one"
            )
        if isinstance(self.whole, str):
            raise ValueError(f"expected names in whole, found the text {self.whole!r}; take ({self.whole!r},)")
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name in ("microbatches", "bucket_bytes", "seed"):
            value = getattr(self, name)
            if (isinstance(value, bool) or not isinstance(value, Integral)) and (name != "seed" or value is not None):
                raise ValueError(f"expected a whole number for {name}, found {value!r}; give one")
        if isinstance(self.heartbeat_timeout_s, bool) or not isinstance(self.heartbeat_timeout_s, Real):
            raise ValueError(f"expected seconds for heartbeat_timeout_s, found {self.heartbeat_timeout_s!r}; give some")
        if self.microbatches < 1 or self.bucket_bytes < 1 or self.heartbeat_timeout_s <= 0:
            raise ValueError(
                f"expected positive microbatches, bucket_bytes and heartbeat_timeout_s, found {self}; give at least 1"
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

    def find_schedule(self, ranks: int, stages: int) -> Schedule | None:
        """What each rank does; None where only torch.distributed.pipelining knows.

        Raises:
            PipelineError: if these numbers do not fit.
        """
        if stages % ranks or stages < ranks:
            raise PipelineError(
                f"expected a number of stages that the {ranks} ranks divide, found {stages}; "
                "partition into another number, or start another number of processes"
            )
        if self.uses_torch and self.schedule == "zero_bubble":
            return None
        return make_schedule(self.schedule, ranks=ranks, stages=stages, microbatches=self.microbatches)
