"""Which tensor lies where: tensors in equal chunks, in order of use.

Source: the preprocessing pass of PatrickStar (arXiv 2108.05818). A chunk is contiguous, and a tensor lies in one chunk
whole. So a chunk is at least as large as the largest tensor, and what the next tensor does not fit in stays empty.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch_lms.errors import ChunkError

__all__ = [
    "ALIGNMENT",
    "Layout",
    "Piece",
    "Place",
    "aligned",
    "best_chunk_numel",
    "pack",
    "patrickstar_chunk_numel",
    "piece_of",
]

ALIGNMENT = 128  # elements: 256 bytes of 16-bit numbers, as far apart as tensors of their own would begin

_FEWEST_CHUNKS = 16  # of a model, so that moving one moves little of it
_LEAST_NUMEL = 1 << 25  # 64 MiB of 16-bit numbers: from there on a link is at its full rate
_PATRICKSTAR_STEP = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor lies.

    Attributes:
        chunk: its number, in all lists alike.
        offset: of the first element in the chunk.
        numel: how many elements.
    """

    chunk: int
    offset: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one of several equal parts of a chunk holds of a tensor.

    Attributes:
        offset: of the first element in the part.
        begin: of the first element in the tensor, whose elements are counted as they lie.
        numel: how many; none, if the tensor lies in other parts.
    """

    offset: int
    begin: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where all tensors lie.

    Attributes:
        chunk_numel: elements of every chunk.
        chunks: how many.
        places: of the tensors, in their order.
    """

    chunk_numel: int
    chunks: int
    places: tuple[Place, ...]

    @property
    def waste(self) -> float:
        """The share of all chunks that holds no tensor."""
        room = self.chunks * self.chunk_numel
        return 1 - sum(place.numel for place in self.places) / room if room else 0.0


def piece_of(place: Place, part_numel: int, part: int) -> Piece:
    """What a part of the tensor's chunk holds of it.

    Args:
        place: of the tensor.
        part_numel: elements of each part of a chunk.
        part: which of them.
    """
    first = part * part_numel
    begin, end = max(place.offset, first), min(place.offset + place.numel, first + part_numel)
    if begin >= end:
        return Piece(offset=0, begin=0, numel=0)
    return Piece(offset=begin - first, begin=begin - place.offset, numel=end - begin)


def aligned(numel: int) -> int:
    """The elements that a tensor takes; also an empty one lies somewhere."""
    return -(-max(numel, 1) // ALIGNMENT) * ALIGNMENT


def pack(runs: Iterable[Sequence[int]], chunk_numel: int) -> Layout:
    """Packs tensors one behind the other; a tensor that does not fit any more begins the next chunk.

    Args:
        runs: elements of tensors, in order of use. No chunk holds tensors of two runs.
        chunk_numel: elements of a chunk; a multiple of `ALIGNMENT`.

    Raises:
        ChunkError: if a tensor is larger than a chunk.
    """
    places: list[Place] = []
    chunk = -1
    for run in runs:
        end = chunk_numel
        for numel in run:
            if aligned(numel) > chunk_numel:
                raise ChunkError(
                    f"expected chunks of at least {aligned(numel)} elements, which the largest tensor needs, found "
                    f"{chunk_numel}; raise chunk_numel, or leave it out"
                )
            if end + aligned(numel) > chunk_numel:
                chunk, end = chunk + 1, 0
            places.append(Place(chunk=chunk, offset=end, numel=numel))
            end += aligned(numel)
    return Layout(chunk_numel=chunk_numel, chunks=chunk + 1, places=tuple(places))


def best_chunk_numel(runs: Sequence[Sequence[int]]) -> int:
    """The size with the least waste, of all sizes that are neither too small for the link nor too large to move.

    Only sizes at which some chunk is exactly full can be best: any other could be reduced, and hold the same. They are
    sums of neighbours. Of equally good ones the smallest is taken.
    """
    low, high = _range(runs)
    sums = [list(accumulate(map(aligned, run), initial=0)) for run in runs]
    candidates = {low}
    for ends in sums:
        for at, begin in enumerate(ends):
            candidates.update(
                end - begin for end in ends[bisect_right(ends, begin + low - 1, at) : bisect_right(ends, begin + high)]
            )
    return min(sorted(candidates), key=lambda size: _room(sums, size))


def patrickstar_chunk_numel(runs: Sequence[Sequence[int]]) -> int:
    """What PatrickStar's search finds in the same range: sizes in equal steps, and the least waste among these."""
    low, high = _range(runs)
    sums = [list(accumulate(map(aligned, run), initial=0)) for run in runs]
    return min(range(low, high + 1, _PATRICKSTAR_STEP), key=lambda size: _room(sums, size))


def _range(runs: Sequence[Sequence[int]]) -> tuple[int, int]:
    sizes = [aligned(numel) for run in runs for numel in run]
    low = max(max(sizes), min(_LEAST_NUMEL, aligned(sum(sizes) // _FEWEST_CHUNKS)))
    return low, 2 * low


def _room(sums: Sequence[Sequence[int]], chunk_numel: int) -> int:
    """The elements of all chunks; `sums` are the runs' aligned sizes, summed from their beginnings."""
    chunks = 0
    for ends in sums:
        at = 0
        while at < len(ends) - 1:
            at = bisect_right(ends, ends[at] + chunk_numel, at) - 1
            chunks += 1
    return chunks * chunk_numel
