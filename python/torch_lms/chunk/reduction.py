"""Gradients of whole chunks, and their means over ranks, of which each keeps its part.

Note [The order of reductions]
All ranks must reduce the same chunks in the same order, and not all need have the same gradients: an expert may have
got no token on one of them. So each backward reduces every chunk once, in one order for all: at first the reverse of
the model's, later that in which the first rank's chunks were complete in its first backward. What is missing counts as
zero. Which parameters have a gradient at all, and whether all ranks have gathered the same chunks, is asked of all once
for each backward, and known at the step.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torch_lms._torch_compat import reduce_scatter_single
from torch_lms.chunk.model_data import ModelData
from torch_lms.chunk.ranks import Ranks, until_destroyed
from torch_lms.errors import ChunkError

__all__ = ["Reductions"]

_AT_ONCE = 2  # one on its way, one behind it


@dataclass(frozen=True)
class _Running:
    chunk: int
    whole: torch.Tensor
    work: dist.Work


class Reductions:
    """Collects a backward's gradients chunk by chunk, and takes their means.

    Not thread-safe: the owner's lock guards it. On CUDA the current stream waits for what is reduced, not the caller.

    Args:
        data: of the model.
        place_of: of a chunk whose reduced gradients are not in memory of their own yet: where they go.
    """

    def __init__(self, data: ModelData, place_of: Callable[[int], torch.Tensor]) -> None:
        self.parts: dict[int, torch.Tensor] = {}
        """Reduced gradients by chunk: this rank's part of each."""
        self._data = data
        self._ranks = data.ranks
        self._place_of = place_of
        group = _another_group(data.ranks)  # gathering has the ranks' own: neither waits for the other
        self._find_group = until_destroyed(group)
        self._averages = _averages(group, data)
        trained = (
            chunk
            for chunk, numbers in enumerate(data.in_chunk)
            if data.is_cut[chunk] and any(data.tensors[number].group is not None for number in numbers)
        )
        self._order = sorted(trained, reverse=True)
        self._order_is_known = False
        self._completed: list[int] = []
        self._wholes: dict[int, torch.Tensor] = {}
        self._here: set[int] = set()  # numbers whose gradients have come in this backward
        self._since_step: set[int] = set()  # and in those before, but the ones that the program has dropped
        self._reduced = 0  # of the order, in this backward
        self._running: deque[_Running] = deque()
        self._trail = 0  # of what was gathered since the step
        self._anywhere: tuple[torch.Tensor, dist.Work] | None = None

    def arrived(self, number: int, gradient: torch.Tensor) -> None:
        """A gradient has come, or a share of one: checkpoints that run again bring one each.

        Args:
            number: of the tensor.
            gradient: in the parameter's shape.

        Raises:
            ChunkError: if the tensor's chunk is complete.
        """
        data = self._data
        chunk = data.chunk_of(number)
        if chunk in self._completed:
            raise ChunkError(
                f"expected the gradient of {data.tensors[number].name} while the backward of its module "
                "ran, found it later; pass parameters only to modules that own them"
            )
        if chunk not in self._wholes:
            self._wholes[chunk] = torch.zeros(data.layout.chunk_numel, dtype=data.dtype, device=data.device)
        place, view = data.layout.places[number], data.views[number]
        here = self._wholes[chunk].as_strided(view.shape, view.stride(), place.offset)
        if number in self._here:
            here.add_(gradient)
        else:
            here.copy_(gradient)
        self._here.add(number)

    def complete(self, chunk: int) -> None:
        """All gradients of a chunk have come that will in this backward."""
        if chunk in self._order and chunk not in self._completed:
            self._completed.append(chunk)
            self._reduce_ready()

    def is_under_way(self, chunk: int) -> bool:
        """Whether its gradients are being reduced."""
        return any(one.chunk == chunk for one in self._running)

    def end_backward(self, whole: Iterable[int]) -> None:
        """No more gradients come in this backward; all ranks are told so.

        Args:
            whole: tensors that are not cut, and have gradients.
        """
        self._here.update(whole)
        for chunk in self._order:
            if chunk not in self._completed:
                self._completed.append(chunk)
        self._reduce_ready()
        came = torch.zeros(len(self._data.tensors), dtype=torch.uint8)
        came[sorted(self._here | self._since_step)] = 1
        trail = self._trail = zlib.crc32(self._data.gathered.take_trail().to_bytes(4, "little"), self._trail)
        words = torch.tensor([*trail.to_bytes(4, "little"), *(255 - one for one in trail.to_bytes(4, "little"))])
        came = torch.cat([came, words.to(torch.uint8)]).to(self._data.device)
        self._anywhere = came, dist.all_reduce(came, dist.ReduceOp.MAX, group=self._find_group(), async_op=True)
        if not self._order_is_known:
            self._order = self._ranks.first_of(self._completed)
            self._order_is_known = True
        self._since_step |= self._here
        self._start_anew()

    def abandon_backward(self) -> None:
        """One that has failed: what came in it and was not reduced is gone."""
        self._start_anew()

    def finish(self) -> None:
        """Everything that is on its way is in `parts`."""
        while self._running:
            self._finish_first()

    def came_elsewhere(self) -> set[int]:
        """The tensors that have gradients since the last step, though none came here. Waits for all ranks.

        Raises:
            ChunkError: if ranks have gathered other chunks.
        """
        if self._anywhere is None:
            return set()
        came, work = self._anywhere
        work.wait()
        said = came.tolist()
        flags, words, inverted = said[:-8], said[-8:-4], said[-4:]
        if any(word + other != 255 for word, other in zip(words, inverted, strict=True)):
            raise ChunkError(
                "expected all ranks to call the same units of the model in the same order, and to need gradients of "
                "their outputs alike, found ranks that differ; have a block that is not used return its input times one"
            )
        return {number for number, flag in enumerate(flags) if flag} - self._since_step

    def have_come(self) -> set[int]:
        """Tensors whose gradients have come since the last step, and have not been dropped."""
        return set(self._since_step)

    def drop(self, number: int) -> None:
        """The gradient that has come of a tensor is not wanted."""
        self.finish()
        self._since_step.remove(number)
        part = self.parts.get(self._data.chunk_of(number))
        if part is not None:
            self._data.part_of(part, number).zero_()

    def forget(self) -> None:
        """Gradients have been used, or are not wanted."""
        self.finish()
        self._trail = 0
        self._data.gathered.take_trail()
        self.parts.clear()
        self._since_step.clear()
        self._anywhere = None

    def _start_anew(self) -> None:
        self._wholes.clear()
        self._here.clear()
        self._completed = []
        self._reduced = 0

    def _reduce_ready(self) -> None:
        while self._reduced < len(self._order) and self._order[self._reduced] in self._completed:
            self._reduce(self._order[self._reduced])
            self._reduced += 1

    def _reduce(self, chunk: int) -> None:
        data = self._data
        whole = self._wholes.pop(chunk, None)
        if whole is None:
            whole = torch.zeros(data.layout.chunk_numel, dtype=data.dtype, device=data.device)
        if not self._averages:
            whole.div_(self._ranks.size)  # before: a sum of 16-bit numbers may be too large
        op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        part = whole.chunk(self._ranks.size)[self._ranks.rank]
        work = reduce_scatter_single(part, whole, op=op, group=self._find_group(), async_op=True)
        self._running.append(_Running(chunk, whole, work))
        while len(self._running) > _AT_ONCE:
            self._finish_first()

    def _finish_first(self) -> None:
        running = self._running.popleft()
        running.work.wait()
        part = running.whole.chunk(self._ranks.size)[self._ranks.rank]
        if running.chunk in self.parts:
            self.parts[running.chunk].add_(part)
        else:
            self.parts[running.chunk] = self._place_of(running.chunk).copy_(part)


def _another_group(ranks: Ranks) -> dist.ProcessGroup:
    """Of the same ranks, for collectives of its own.

    Ranks that make a group without the others meet under a name. Before PyTorch 2.15 the number of groups that each is
    in is a part of it: who is in fewer gets some of its own before.
    """
    members = dist.get_process_group_ranks(ranks.group)
    together = len(members) == dist.get_world_size()
    if not together and len(set(ranks.all_of(dist.distributed_c10d._hash_ranks_to_str(members)))) > 1:
        groups = len(dist.distributed_c10d._world.pg_names)
        for _ in range(groups, max(ranks.all_of(groups))):
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
    made: dist.ProcessGroup = dist.new_group(members, use_local_synchronization=not together)
    return made


def _averages(group: dist.ProcessGroup, data: ModelData) -> bool:
    """Whether the collective takes means itself, with the bits of a division before it.

    NCCL multiplies each rank's numbers by one over the number of ranks, in their own type, before it adds them up:
    exact for powers of two alone.
    """
    size = data.ranks.size
    return data.device.type == "cuda" and size & (size - 1) == 0 and "nccl" in dist.get_backend_config(group)
