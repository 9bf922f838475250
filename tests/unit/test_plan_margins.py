"""How far below its limit a plan stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torch_lms.plan.margins import margins as margins_of
from torch_lms.swap import planning

GIB = 1 << 30


def trace(device: str, *sizes: int) -> Any:
    return SimpleNamespace(device=device, storages=[SimpleNamespace(bytes=size) for size in sizes])


def margins(device: str, *, is_crowded: bool) -> tuple[int, int]:
    found = margins_of(trace(device, GIB // 8, GIB // 2), 32 * GIB, is_crowded=is_crowded)
    return found["margin_bytes"], found["pieces_bytes"]


def test_the_largest_storage_has_room_in_one_piece() -> None:
    assert margins("cuda:0", is_crowded=False) == (GIB, GIB // 2)


def test_where_that_was_too_little_an_eighth_of_the_limit_stays_free() -> None:
    assert margins("cuda:0", is_crowded=True) == (GIB, 3 * GIB)


@pytest.mark.parametrize("is_crowded", [False, True])
def test_a_processor_s_memory_does_not_lie_in_pieces(is_crowded: bool) -> None:
    assert margins("cpu", is_crowded=is_crowded) == (GIB, 0)


@pytest.mark.parametrize(
    ("name", "measured", "expected"),
    [
        ("a#1", ("a#1", 1111.0, GIB), True),
        ("a#1", ("a#1", 1099.0, GIB), False),
        ("a#1", ("b#2", 9999.0, GIB), False),
        ("a#1", ("", 0.0, 0), False),
        ("unknown#7", ("unknown#7", 9999.0, GIB), False),
    ],
)
def test_a_plan_is_too_tight_if_its_own_steps_take_much_longer(
    name: str, measured: tuple[str, float, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan: Any = SimpleNamespace(step_us=1000.0)
    monkeypatch.setitem(planning._plans, "a#1", plan)
    monkeypatch.setattr(planning.core, "measured_plan", lambda: measured)
    assert planning._takes_much_longer(name) is expected
