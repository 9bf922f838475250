"""Where tensors lie in chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_lms.chunk.layout import ALIGNMENT, aligned, best_chunk_numel, pack, patrickstar_chunk_numel
from torch_lms.errors import ChunkError

RUNS = st.lists(st.lists(st.integers(1, 40 * ALIGNMENT), min_size=1, max_size=12), min_size=1, max_size=3)

# GPT 1.3B, 24 layers of width 2048, in order of use.
LAYER = [
    2048,
    2048,
    3 * 2048 * 2048,
    3 * 2048,
    2048 * 2048,
    2048,
    2048,
    2048,
    4 * 2048 * 2048,
    8192,
    4 * 2048 * 2048,
    2048,
]
GPT = [50304 * 2048, 2048 * 2048, *LAYER * 24, 2048, 2048]


@given(RUNS, st.integers(40, 200))
def test_tensors_lie_in_one_chunk_each_in_order_without_overlap(runs: list[list[int]], blocks: int) -> None:
    chunk_numel = blocks * ALIGNMENT
    layout = pack(runs, chunk_numel)
    assert [place.numel for place in layout.places] == [numel for run in runs for numel in run]
    ends = {-1: 0}
    for place in layout.places:
        assert place.chunk in (max(ends), max(ends) + 1)
        assert place.offset == ends.get(place.chunk, 0)
        assert place.offset % ALIGNMENT == 0
        ends[place.chunk] = place.offset + aligned(place.numel)
        assert ends[place.chunk] <= chunk_numel
    assert layout.chunks == max(ends) + 1
    first = 0
    for run in runs:  # no chunk of two runs
        assert first == 0 or layout.places[first].chunk == layout.places[first - 1].chunk + 1
        first += len(run)
    assert 0 <= layout.waste < 1


@given(RUNS)
def test_no_size_in_the_range_wastes_less(runs: list[list[int]]) -> None:
    def room(chunk_numel: int) -> int:
        return pack(runs, chunk_numel).chunks * chunk_numel

    best = best_chunk_numel(runs)
    sizes = [aligned(numel) for run in runs for numel in run]
    low = max(max(sizes), aligned(sum(sizes) // 16))
    assert low <= best <= 2 * low
    assert room(best) == min(room(size) for size in range(low, 2 * low + 1, ALIGNMENT))


def test_the_search_wastes_no_more_than_patrickstars() -> None:
    ours, theirs = pack([GPT], best_chunk_numel([GPT])), pack([GPT], patrickstar_chunk_numel([GPT]))
    assert ours.waste <= theirs.waste
    assert ours.waste < 0.05


def test_a_tensor_larger_than_a_chunk_is_named() -> None:
    with pytest.raises(
        ChunkError, match="expected chunks of at least 1024 elements, which the largest tensor needs, found 512"
    ):
        pack([[10, 1000]], 512)
