"""`train`: from a model to a pipeline that trains it, in one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_lms.balanced import BalanceConfig, create_balanced_partition
from torch_lms.devices import find_device
from torch_lms.errors import PipelineError
from torch_lms.memory_sizes import parse_bytes
from torch_lms.partition.costs import OPTIMIZER_MULTIPLIERS, CostModel, DataParallel
from torch_lms.partition.relief import MemoryRelief
from torch_lms.pipeline.boundary import LossFunction
from torch_lms.pipeline.config import PipelineConfig
from torch_lms.pipeline.microbatches import cut_batch
from torch_lms.pipeline.runner import Pipeline
from torch_lms.profile.profiler import ProfileConfig
from torch_lms.ranks.members import find_members, find_own_device
from torch_lms.schedules.rules import ONE_STAGE_EACH
from torch_lms.stages.running import Stages

__all__ = ["TrainingPipeline", "train"]

# NCCL's transfers take units of a GPU and of its memory's rate from what it computes; how much depends on both.
_CUDA_TRANSFER_SHARE = 0.25

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def train(
    model: nn.Module,
    group: Any,
    sample_input: Any,
    *,
    schedule: str = "1f1b",
    microbatches: int = 1,
    optimizer: str | MakeOptimizer | None = "adamw",
    loss: LossFunction | None = None,
    autocast: torch.dtype | None = None,
    data_parallel: Any = None,
    stages: int | None = None,
    device: Any = None,
    algorithm: Any = "auto",
    executor: str = "auto",
    seed: int | None = None,
    whole: tuple[str, ...] = (),
    profile: ProfileConfig | None = None,
    memory_cap_bytes: int | str | None = None,
    relief: MemoryRelief | None = None,
    state_dict: Mapping[str, Any] | None = None,
    init_fn: Callable[[nn.Module], None] | None = None,
) -> TrainingPipeline:
    """Cuts a model into balanced stages, puts them on the ranks of a group, and trains them.

        pipeline = torch_lms.pipeline.train(model, mesh["pp"], batch, microbatches=8, data_parallel=mesh["dp"])
        for batch in batches:
            loss = pipeline.step(batch)  # forward, backward and optimizer; a tensor on the last rank, elsewhere None

    All ranks of the world call it alike, whatever their group: rank 0 profiles one microbatch, and all pipelines take
    its partition. `torch.distributed` has been initialized, and on GPUs the device set. Close the pipeline at the end,
    or use it in a ``with`` statement.

    Args:
        model: on the CPU, on rank 0's device, or on the meta device.
        group: the ranks of this pipeline: a process group, a DeviceMesh of one dimension, or None for the world.
        sample_input: a batch as `step` will take it: one argument, a tuple of arguments, or a dict or other
            mapping of keyword arguments.
        schedule: as in `PipelineConfig`.
        microbatches: that a batch is cut into; `sample_input` is cut like one.
        optimizer: the name of one of torch.optim's, such as ``"adamw"`` or ``"sgd"``, with its own defaults; or what
            makes one of parameters: a class, or ``partial(torch.optim.AdamW, lr=1e-3)``. None: `step` leaves parameters
            and gradients to the program, which under float16 uses `Pipeline.scaler`.
        loss: takes what the model returns and the target; None if the model returns its loss.
        autocast: as in `PipelineConfig`; the model is profiled under it. Under ``torch.float16`` the loss is scaled
            with the defaults of `torch.amp.GradScaler`, and a step whose gradients overflow on any rank is skipped.
        data_parallel: as for `Pipeline`.
        stages: how many; by default one on each rank, or two under schedules that interleave.
        device: of this rank, as for `Pipeline`.
        algorithm: of the partition, as for `create_balanced_partition`.
        executor: as in `PipelineConfig`.
        seed: as in `PipelineConfig`.
        whole: as in `PipelineConfig`.
        profile: how to profile, by default on rank 0's device.
        memory_cap_bytes: of each device, as in `BalanceConfig`: bytes, or a text such as ``"40GiB"``, or on CUDA
            ``"80%"``.
        relief: what stages without room give up, as in `BalanceConfig`.
        state_dict: of the model, as for `Pipeline`.
        init_fn: as for `Pipeline`.

    Raises:
        PipelineError: for an unknown optimizer or a device that is not there, or as `Pipeline` does.
        PartitionError: as `create_balanced_partition` does.
        LimitError: for a cap that is no size.
    """
    make_optimizer = _find_optimizer(optimizer)
    config = PipelineConfig(
        schedule=schedule, microbatches=microbatches, executor=executor, seed=seed, whole=whole, autocast=autocast
    )
    members = find_members(group, "group")
    own_device = find_device(find_own_device(members, device), PipelineError)
    count = members.count * (1 if schedule in ONE_STAGE_EACH else 2) if stages is None else stages
    args, kwargs = _first_microbatch(model, sample_input, config)
    balance = BalanceConfig(
        profile=replace(profile or ProfileConfig(device=own_device, progress=False), autocast=autocast),
        cost=CostModel(
            schedule=schedule,
            microbatches=microbatches,
            transfers_in_turn=own_device.type == "cuda",
            transfer_share=_CUDA_TRANSFER_SHARE if own_device.type == "cuda" else 0.0,
            data_parallel=_replicas(data_parallel, config),
            outputs_stay=loss is not None,
        ),
        memory_cap_bytes=_cap_bytes(memory_cap_bytes, own_device),
        relief=relief,
        materialize=False,  # the pipeline does it
    )
    places = [f"rank:{stage % members.count}/{_device_of(own_device, stage % members.count)}" for stage in range(count)]
    made = create_balanced_partition(
        model, places, *args, algorithm=algorithm, optimizer=_priced(optimizer), config=balance, **kwargs
    )
    return TrainingPipeline(
        made,
        make_optimizer,
        group=group,
        data_parallel=data_parallel,
        device=own_device,
        loss=loss,
        config=config,
        state_dict=state_dict,
        init_fn=init_fn,
    )


class TrainingPipeline(Pipeline):
    """A pipeline with an optimizer.

    Args:
        stages: as for `Pipeline`.
        make_optimizer: takes this rank's parameters; None for no optimizer.
        options: all others of `Pipeline`.

    Attributes:
        optimizer: of this rank's parameters, or None; for schedulers of the learning rate, and for its state.
        partition: the stage of each node of the model, and what a step was predicted to take.
    """

    def __init__(self, stages: Stages, make_optimizer: MakeOptimizer | None, **options: Any) -> None:
        super().__init__(stages, **options)
        assert stages.partition is not None
        self.partition = stages.partition
        parameters = list(self.parameters())
        self.optimizer = make_optimizer(parameters) if make_optimizer is not None and parameters else None
        self._steps_itself = make_optimizer is not None

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor | None:
        """Forward and backward of one batch; the optimizer, if there is one, then steps and gradients are forgotten.

        Under float16 no rank's optimizer steps where gradients overflow on any of them, and the loss scale is halved.
        Arguments, result and errors are those of `Pipeline.step`.
        """
        loss = super().step(*args, target=target, **kwargs)
        if not self._steps_itself:
            return loss
        if self.scaler is not None:
            # Also where this rank has no parameters: the others ask it for its gradients.
            self.scaler.step(self.optimizer or torch.optim.SGD([{"params": []}], lr=0.0))
            self.scaler.update()
        elif self.optimizer is not None:
            self.optimizer.step()
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        return loss


def _find_optimizer(given: str | MakeOptimizer | None) -> MakeOptimizer | None:
    if given is None or callable(given):
        return given
    if isinstance(given, torch.optim.Optimizer):
        raise PipelineError(
            f"expected what makes an optimizer of the parameters of each rank, found a {type(given).__name__} of a "
            f"model's own; pass a function that makes it, such as partial(torch.optim.{type(given).__name__}, lr=...)"
        )
    if not isinstance(given, str):
        raise PipelineError(
            f"expected the name of an optimizer, or a function of parameters that makes one, found {given!r}; pass "
            "such as 'adamw' or partial(torch.optim.AdamW, lr=...)"
        )
    known = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    if given.lower() not in known:
        raise PipelineError(
            f"expected an optimizer among {', '.join(sorted(known))}, found {given!r}; choose one, or pass a class or "
            "partial(torch.optim.AdamW, lr=...)"
        )
    made: MakeOptimizer = known[given.lower()]
    return made


def _priced(optimizer: str | MakeOptimizer | None) -> str | MakeOptimizer | None:
    """What tells the partition the optimizer's memory: a name that it knows, or what is measured."""
    known = isinstance(optimizer, str) and optimizer.lower() in OPTIMIZER_MULTIPLIERS
    return optimizer if known else _find_optimizer(optimizer)


def _cap_bytes(cap: int | str | None, device: torch.device) -> int | None:
    """Texts become bytes; percentages are those of what this rank's CUDA device has."""
    if not isinstance(cap, str):
        return cap
    has = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return parse_bytes(cap, total_bytes=has)


def _replicas(group: Any, config: PipelineConfig) -> DataParallel:
    ranks = 1 if group is None else find_members(group, "data_parallel").count
    return DataParallel(ranks=ranks, bucket_bytes=config.bucket_bytes)


def _first_microbatch(
    model: nn.Module, sample: Any, config: PipelineConfig
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    named = isinstance(sample, Mapping)  # a dict, or such as a BatchEncoding of transformers
    args = () if named else sample if isinstance(sample, tuple) else (sample,)
    kwargs = dict(sample) if named else {}
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError as error:
        raise PipelineError(
            f"expected a sample of the arguments of {type(model).__name__}.forward{signature}, found another: {error}; "
            "pass what a step is to be called with"
        ) from error
    names = list(bound.arguments)[: len(args)] if args else []
    if len(names) < len(args):  # the last name takes several
        names = [*names[:-1], *(f"{names[-1]}_{place}" for place in range(len(args) - len(names) + 1))]
    cut = cut_batch({**dict(zip(names, args, strict=False)), **kwargs}, config.microbatches, config.whole)[0]
    return tuple(cut[name] for name in names), {name: cut[name] for name in kwargs}


def _device_of(own: torch.device, place: int) -> str:
    """A device like this rank's for another one; on CUDA by the number that it has on its host, as a rule."""
    if own.type != "cuda":
        return str(own)
    return f"cuda:{place % torch.cuda.device_count()}" if dist.get_world_size() > 1 else str(own)
