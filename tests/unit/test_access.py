"""Each kind of access, in each state that a storage can be found in."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.unit.access_kinds import OP_KINDS, AccessKind, skip_what_nothing_tells_of
from tests.unit.paging_states import STATES, Place, round_trip, snapshot
from tests.unit.program_access_kinds import PROGRAM_KINDS
from tests.unit.raw_access_kinds import RAW_KINDS

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse:UserWarning",
    "ignore:The PyTorch API of nested tensors:UserWarning",
    "ignore:TypedStorage",
    "ignore:`torch.jit",
)

KINDS = OP_KINDS + RAW_KINDS + PROGRAM_KINDS


def seen(kind: AccessKind, place: Place, *, again: bool) -> Any:
    """What an access returns and leaves behind; also after its tensors have gone out and come back."""
    torch.manual_seed(0)
    tensors = kind.make("cpu")
    place(tensors)
    result = kind.access(*tensors)
    at_once = snapshot((result, tensors))
    if again:
        refused = round_trip(tensors)
        assert kind.pins == (refused > 0)
    return at_once, snapshot((result, tensors))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_access_in_every_state_is_bit_equal(kind: AccessKind, state: str, paged: ModuleType) -> None:
    skip_what_nothing_tells_of(kind.name, state)
    plain = seen(kind, STATES["plain"], again=False)
    assert seen(kind, STATES[state], again=state != "plain") == plain


@pytest.mark.parametrize(
    ("place", "states"),
    [
        ("plain", {"resident"}),
        ("paged_out", {"paged_out"}),
        ("page_out_enqueued", {"out_queued", "paging_out"}),
        ("page_out_enqueued_behind_another", {"out_queued", "paging_out"}),
        ("prefetch_enqueued", {"in_queued", "paging_in"}),
        ("prefetch_held", {"in_queued"}),
        ("prefetched", {"resident"}),
    ],
)
def test_states_are_what_they_say(place: str, states: set[str], paged: ModuleType, chaos: bool) -> None:
    if chaos:
        pytest.skip("storages go where they like")
    tensor = torch.randn(100)
    STATES[place]([tensor])
    assert paged.swap.state(tensor) in states


def test_the_table_has_every_kind_once() -> None:
    names = [kind.name for kind in KINDS]
    assert len(names) == len(set(names)) >= 150
