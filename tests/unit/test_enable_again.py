"""Automatic mode after paging was used before: what is known already counts, and can go out."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

LIMIT_BYTES = 64 << 10


def eight_tenths(first: int) -> list[torch.Tensor]:
    """Of the limit."""
    return [torch.arange(2500.0) + first + i for i in range(5)]


@pytest.mark.parametrize("used_again", [False, True])
def test_storages_of_an_earlier_automatic_mode_can_go_out(used_again: bool, paged: ModuleType) -> None:
    paged.enable(limit=LIMIT_BYTES, min_bytes=512)
    early = eight_tenths(0)
    paged.disable()
    paged.enable(limit=LIMIT_BYTES, min_bytes=512)
    paged.stats(reset=True)
    if used_again:
        early = [tensor.add_(0) for tensor in early]
    late = eight_tenths(100)
    for i in range(5):
        assert torch.equal(early[i], torch.arange(2500.0) + i)
        assert torch.equal(late[i], torch.arange(2500.0) + 100 + i)
    assert paged.stats().peak_allocated_bytes <= LIMIT_BYTES


def test_lower_limit_while_on_makes_room_from_what_is_there(paged: ModuleType, chaos: bool) -> None:
    if chaos:
        pytest.skip("chaos knew storages before")
    paged.enable(limit=4 * LIMIT_BYTES, min_bytes=512)
    early = eight_tenths(0)
    paged.enable(limit=LIMIT_BYTES, min_bytes=512)
    late = eight_tenths(100)
    for i in range(5):
        assert torch.equal(early[i], torch.arange(2500.0) + i)
        assert torch.equal(late[i], torch.arange(2500.0) + 100 + i)
    assert paged.stats().allocated_bytes <= LIMIT_BYTES
