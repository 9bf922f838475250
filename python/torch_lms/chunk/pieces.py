"""Tensors of which each rank has a piece, for `torch.distributed.checkpoint`.

A piece is a run of elements as they lie in memory. A checkpoint knows rectangles only, so a piece is cut into these: at
most one in the middle and two for each dimension at its ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from torch_lms.errors import ChunkError

__all__ = ["PiecesOfTensor", "Rectangle", "rectangles"]


@dataclass(frozen=True)
class Rectangle:
    """Elements of a tensor, one behind the other as they lie.

    Attributes:
        offsets: of the first, by dimension.
        sizes: by dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def rectangles(shape: Sequence[int], begin: int, end: int) -> Iterator[Rectangle]:
    """Cuts a run of a contiguous tensor's elements into rectangles, in order.

    Args:
        shape: of the tensor.
        begin: the run's first element.
        end: behind its last.
    """
    if begin >= end:
        return
    if not shape:
        yield Rectangle((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows between them
    if first > last:  # within one
        yield from _in_row(shape, last, begin, end)
        return
    if begin < first * row:
        yield from _in_row(shape, first - 1, begin, first * row)
    if first < last:
        yield Rectangle((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    if last * row < end:
        yield from _in_row(shape, last, last * row, end)


def _in_row(shape: Sequence[int], at: int, begin: int, end: int) -> Iterator[Rectangle]:
    row = math.prod(shape[1:])
    for one in rectangles(shape[1:], begin - at * row, end - at * row):
        yield Rectangle((at, *one.offsets), (1, *one.sizes))


class PiecesOfTensor(torch.Tensor):
    """A tensor of which this rank has one run of elements. It can be saved and loaded, and nothing else.

    Args:
        whole: its shape and its strides, which leave no gaps.
        run: this rank's elements, as they lie; what is loaded is written to them.
        begin: the run's first element, in the tensor.
    """

    _pieces: dict[torch.Size, torch.Tensor]

    @staticmethod
    def __new__(cls: type[PiecesOfTensor], whole: torch.Tensor, run: torch.Tensor, begin: int) -> PiecesOfTensor:
        """A tensor without memory of its own."""
        made: PiecesOfTensor = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=run.dtype, device=run.device)
        return made

    def __init__(self, whole: torch.Tensor, run: torch.Tensor, begin: int) -> None:
        order = sorted(range(whole.dim()), key=lambda dim: (whole.stride()[dim], whole.shape[dim]), reverse=True)
        back = sorted(range(whole.dim()), key=order.__getitem__)
        self._pieces, at = {}, 0
        for one in rectangles([whole.shape[dim] for dim in order], begin, begin + run.numel()):
            numel = math.prod(one.sizes)
            offsets = torch.Size([one.offsets[place] for place in back])
            self._pieces[offsets] = run[at : at + numel].view(one.sizes).permute(back)
            at += numel

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """For a checkpoint's planner."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(offsets, piece), properties=properties, size=self.size()),
            )
            for offsets, piece in self._pieces.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """For a checkpoint's planner."""
        return [_chunk(offsets, piece) for offsets, piece in self._pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """For a checkpoint's planner."""
        assert index.offset is not None
        return self._pieces[index.offset]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> NoReturn:
        """Never.

        Raises:
            ChunkError: always.
        """
        raise ChunkError(
            "expected a tensor that is spread over ranks to be saved or loaded by torch.distributed.checkpoint's save "
            f"and load, found {op} called with it (as async_save does); for the whole tensor take the model's or the "
            "optimizer's state_dict()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Its shape, and how many rectangles are here."""
        return f"PiecesOfTensor(shape={tuple(self.shape)}, dtype={self.dtype}, rectangles={len(self._pieces)})"


def _chunk(offsets: torch.Size, piece: torch.Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=offsets, sizes=piece.size())
