"""Stages in one process: values move from device to device, and all of them together train as the model would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from torch_lms._torch_compat import tree_map
from torch_lms.errors import PartitionError
from torch_lms.stages.arguments import bind_arguments
from torch_lms.stages.extra_state import KeepsExtraState
from torch_lms.stages.installation import sort_entries
from torch_lms.stages.merging import merge, tie_modules
from torch_lms.stages.own_modes import SetsModes
from torch_lms.stages.placement import own_rank
from torch_lms.stages.stage import Stage

if TYPE_CHECKING:
    from torch_lms.partition.costs import CostModel
    from torch_lms.partition.interface import Partition

__all__ = ["Stages", "run_stages"]


class Stages(SetsModes, KeepsExtraState, Sequence[Stage]):
    """The stages of a model, in order, which together are a module that runs and trains as the model does.

        stages = torch_lms.create_balanced_partition(model, ["cuda:0", "cuda:1"], ids)
        optimizer = torch.optim.AdamW(stages.parameters())
        for ids, targets in batches:
            loss = cross_entropy(stages(ids), targets.to(stages[-1].device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    One device works at a time. `torch_lms.pipeline.Pipeline` takes the same stages and has all of them work at once,
    each in a process of its own.

    Parameters, buffers and state dict are the model's, by its names; where stages belong to other ranks, those of the
    rest. A tied weight is one parameter, on the device of the first stage that has it, and goes from there to the
    others in each forward.

    Args:
        stages: of one model, in order; those of this process are on their devices.
        partition: that they were made by.
        cost: what it was made for.

    Raises:
        PartitionError: if they are not all of a model's stages, in order.

    Attributes:
        partition: the stage of each node, and what that takes; None where the cut was not planned.
        cost: the schedule and the microbatches that the cut was planned for; None where it was not.
    """

    def __init__(
        self, stages: Sequence[Stage], *, partition: Partition | None = None, cost: CostModel | None = None
    ) -> None:
        super().__init__()
        _check_complete(stages)
        self.partition = partition
        self.cost = cost
        self.__stages = list(stages)  # not registered: their names would not be the model's
        self.__gather()

    def __gather(self) -> None:
        """Ties what stages share, and registers what they hold under the model's names."""
        self.training = self.__stages[0].training
        here = [stage for stage in self.__stages if _is_here(stage)]
        _tie(here)
        merge(self, here)
        tie_modules(self, self.__stages[0].twins)
        sort_entries(self, self.__stages[0].order)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, on the last stage's device; see `run_stages`."""
        return run_stages(self.__stages, *args, **kwargs)

    def train(self, mode: bool = True) -> Stages:
        """Sets the mode of all modules, training or evaluation, as on the model.

        Functions such as ``dropout(x, 0.1, self.training)`` follow the mode of the module whose code calls them. Where
        the model computes otherwise in the other mode, such as behind ``if self.training``, a stage refuses to run in
        it: cut the model in the mode that the stages are for. So it does where a ``train`` of the model's own does more
        than to leave some modules in another mode, as norms that stay in evaluation: what it does is tried on a copy
        when the model is cut. Of an `fx.GraphModule` that was not traced here nobody knows, and it has the branches of
        the mode that it was made in.
        """
        super().train(mode)
        for stage in self.__stages:
            stage.train(mode)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Stages:
        for stage in self.__stages:
            if _is_here(stage):
                stage._apply(*args, **kwargs)
        self.__gather()
        return self

    def __len__(self) -> int:
        return len(self.__stages)

    @overload
    def __getitem__(self, index: int) -> Stage: ...

    @overload
    def __getitem__(self, index: slice) -> list[Stage]: ...

    def __getitem__(self, index: int | slice) -> Stage | list[Stage]:
        return self.__stages[index]

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.__stages)

    def extra_repr(self) -> str:
        """How many stages there are, and where."""
        return f"{len(self)} stages on {', '.join(str(stage.placement or stage.device) for stage in self)}"


def run_stages(stages: Sequence[Stage], *args: Any, **kwargs: Any) -> Any:
    """Runs all stages in this process, one after the other, as the model itself would run.

    Arguments and what crosses a border are brought to the device of the stage that uses them; gradients go back.

    Args:
        stages: all of a model's, in order.
        args: of the model, on any device.
        kwargs: of the model.

    Returns:
        What the model returns, on the last stage's device.

    Raises:
        PartitionError: for arguments that the model does not take, or if a stage is missing or belongs to another rank.
    """
    _check_complete(stages)
    _check_here(stages)
    values = bind_arguments(stages[0].arguments, args, kwargs)
    result: Any = ()
    for stage in stages:
        crossing = dict(zip(stage.inputs, (result,) if len(stage.inputs) == 1 else result, strict=False))
        inputs = [to_stage(crossing[name], stage) for name in stage.inputs]
        feeds = {name: to_stage(values[name], stage) for name in stage.feeds}
        with _prepared(stage):
            result = stage(*inputs, **feeds)
    return result


def to_stage(value: Any, stage: Stage) -> Any:
    """Brings the tensors of a value to a stage's device, so that gradients find back; a device becomes the stage's own.

    Between CUDA devices the host does not wait: both devices' streams do. From and to the host it does, so that nobody
    reads bytes that are still on their way, or writes over them.
    """
    device = stage.device
    if device is None:
        return value

    def move(item: Any) -> Any:
        if isinstance(item, torch.device):
            return device
        if not isinstance(item, torch.Tensor) or item.device == device:
            return item
        return item.to(device, non_blocking=item.is_cuda and device.type == "cuda")

    return tree_map(move, value)


def _check_complete(stages: Sequence[Stage]) -> None:
    wrong = next((stage for stage in stages if not isinstance(stage, Stage)), None)
    if wrong is not None:
        raise PartitionError(f"expected stages, found {type(wrong).__name__}; give those that split() makes")
    found = [stage.index for stage in stages]
    count = stages[0].count if found else 1
    if found != list(range(count)):
        raise PartitionError(
            f"expected all {count} stages of a model in order, found {found or 'none'}; give what split() returned"
        )


def _check_here(stages: Sequence[Stage]) -> None:
    for stage in stages:
        if not _is_here(stage):
            raise PartitionError(
                f"expected all stages on devices of this process to run them here, found stage {stage.index} on "
                f"{stage.placement}; train with torch_lms.pipeline.Pipeline, or name devices of this process alone"
            )


@contextmanager
def _prepared(stage: Stage) -> Iterator[None]:
    """Makes the stage's device the current one, and brings there what lives with another stage.

    No stage writes to what others read (`torch_lms.stages.mutations`), so values go one way and gradients the other.
    """
    with ExitStack() as stack:
        if stage.device is not None and stage.device.type == "cuda":
            stack.enter_context(torch.cuda.device(stage.device))
        brought: dict[int, torch.Tensor] = {}
        for name in stage.shared:
            holder, leaf = _holder(stage, name)
            place = _tensors_beside(holder, leaf)
            own = place[leaf]
            if stage.device not in (None, own.device):
                stack.callback(place.__setitem__, leaf, own)
                if id(own) not in brought:
                    brought[id(own)] = to_stage(own, stage)
                place[leaf] = brought[id(own)]
        yield


def _holder(stage: Stage, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return (stage.get_submodule(path) if path else stage), leaf


def _tensors_beside(holder: nn.Module, leaf: str) -> Any:
    """The parameters or the buffers of a module, where a tensor is one."""
    return holder._parameters if leaf in holder._parameters else holder._buffers


def _is_here(stage: Stage) -> bool:
    return stage.placement is None or stage.placement.is_local(own_rank())


def _tie(stages: Sequence[Stage]) -> None:
    """Makes of what several stages share one tensor, that of the first of them."""
    by_index = {stage.index: stage for stage in stages}
    for stage in stages:
        for name, homes in stage.shared.items():
            index, first = min((home for home in homes if home[0] in by_index), default=(stage.index, name))
            if index < stage.index:
                holder, leaf = _holder(stage, name)
                source, source_leaf = _holder(by_index[index], first)
                _tensors_beside(holder, leaf)[leaf] = _tensors_beside(source, source_leaf)[source_leaf]
