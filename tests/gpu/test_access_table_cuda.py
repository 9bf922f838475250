"""The unit tests' table of kinds of access, on CUDA tensors."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.unit.access_kinds import OP_KINDS, AccessKind
from tests.unit.paging_states import STATES, Place, round_trip, snapshot
from tests.unit.raw_access_kinds import RAW_KINDS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

KINDS = [kind for kind in OP_KINDS + RAW_KINDS if not kind.cpu_only]


def seen(kind: AccessKind, place: Place, *, again: bool) -> Any:
    """What an access returns and leaves behind; also after its tensors have gone out and come back."""
    torch.manual_seed(0)
    tensors = kind.make("cuda")
    place(tensors)
    result = kind.access(*tensors)
    at_once = snapshot((result, tensors))
    if again:
        refused = round_trip(tensors)
        assert kind.pins == (refused > 0), f"{refused} storages refused to be paged out"
    return at_once, snapshot((result, tensors))


@functools.cache
def seen_plain(name: str) -> Any:
    return seen(next(kind for kind in KINDS if kind.name == name), STATES["plain"], again=False)


@pytest.mark.parametrize("state", [state for state in STATES if state != "plain"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_access_in_every_state_is_bit_equal(kind: AccessKind, state: str, paged: ModuleType) -> None:
    assert seen(kind, STATES[state], again=True) == seen_plain(kind.name)
