"""Which tensors have bytes in common, against sets of the bytes of each."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_lms.shared_bytes import pairs_that_share

BYTES = 64
DTYPES = (torch.uint8, torch.float16, torch.float32, torch.float64)


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.dtype, tuple[int, int], tuple[int, int], int]:
    dtype = draw(st.sampled_from(DTYPES))
    elements = BYTES // dtype.itemsize
    steps = draw(st.integers(0, 8)), draw(st.integers(1, 3))
    shape = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    reach = sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    begin = draw(st.integers(0, 3 if reach < elements - 4 else 0))
    return dtype, shape if reach < elements - 4 else (1, 1), steps, begin


def bytes_of(view: tuple[torch.dtype, tuple[int, int], tuple[int, int], int]) -> set[int]:
    dtype, (rows, columns), (down, along), begin = view
    places = {begin + row * down + column * along for row in range(rows) for column in range(columns)}
    return {place * dtype.itemsize + one for place in places for one in range(dtype.itemsize)}


@given(st.lists(views(), min_size=1, max_size=6))
def test_each_tensor_is_paired_with_the_first_owners_of_its_bytes(
    of_one: list[tuple[torch.dtype, tuple[int, int], tuple[int, int], int]],
) -> None:
    base = torch.zeros(BYTES, dtype=torch.uint8)
    tensors = [base.view(dtype).as_strided(shape, steps, begin) for dtype, shape, steps, begin in of_one]
    owners: dict[int, int] = {}
    expected = set()
    for number, view in enumerate(of_one):
        expected |= {(owners[place], number) for place in bytes_of(view) if place in owners}
        owners.update({place: number for place in bytes_of(view) if place not in owners})
    assert set(pairs_that_share([*tensors, torch.zeros(3)])) == expected


def test_columns_that_lie_in_turns_have_bytes_of_their_own() -> None:
    matrix = torch.zeros(64, 512)
    assert list(pairs_that_share([matrix[:, place] for place in range(512)])) == []
    assert list(pairs_that_share([matrix[:, :100], matrix[:, 99:]])) == [(0, 1)]


def test_other_storages_lazy_and_sparse_tensors_have_none_in_common() -> None:
    lazy = torch.nn.parameter.UninitializedParameter()
    sparse = torch.eye(3).to_sparse()
    assert list(pairs_that_share([torch.zeros(3), torch.zeros(3), lazy, sparse, torch.zeros(0)])) == []
