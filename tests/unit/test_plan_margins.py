"""How far below its limit a plan stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torch_lms.plan.margins import lost_share
from torch_lms.plan.margins import margins as margins_of
from torch_lms.swap import planning

GIB = 1 << 30


def trace(device: str, *sizes: int) -> Any:
    return SimpleNamespace(device=device, storages=[SimpleNamespace(bytes=size) for size in sizes])


def margins(device: str, largest_bytes: int, *, lost: float = 0.0) -> tuple[int, int]:
    found = margins_of(trace(device, GIB // 8, largest_bytes), 32 * GIB, lost=lost)
    return found["margin_bytes"], found["pieces_bytes"]


def test_the_largest_storage_has_room_in_one_piece() -> None:
    assert margins("cuda:0", GIB // 2) == (GIB, GIB // 2)


@pytest.mark.parametrize(("lost", "pieces_bytes"), [(0.039, GIB // 2), (0.041, GIB), (0.099, GIB), (0.101, 3 * GIB)])
def test_the_more_a_step_loses_the_more_room_stays_free(lost: float, pieces_bytes: int) -> None:
    assert margins("cuda:0", GIB // 2, lost=lost) == (GIB, pieces_bytes)


@pytest.mark.parametrize("lost", [0.0, 0.05, 0.5])
def test_pieces_take_no_more_than_their_share_of_the_limit(lost: float) -> None:
    assert margins("cuda:0", 4 * GIB, lost=lost) == (GIB, 3 * GIB)


@pytest.mark.parametrize("lost", [0.0, 0.05, 0.5])
def test_a_processor_s_memory_does_not_lie_in_pieces(lost: float) -> None:
    assert margins("cpu", GIB // 2, lost=lost) == (GIB, 0)


@pytest.mark.parametrize(
    ("step_us", "wait_us", "expected"),
    [
        (1100.0, 400.0, 0.1),  # what it took longer
        (1400.0, 100.0, 0.1),  # what it waited: the rest has other causes
        (900.0, 100.0, 0.0),
        (0.0, 0.0, 0.0),  # nobody knows
    ],
)
def test_a_step_loses_what_it_takes_longer_if_it_waits_for_memory(
    step_us: float, wait_us: float, expected: float
) -> None:
    assert lost_share(1000.0, step_us, wait_us) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "expected"), [("a#1", {"step_us": 1111.0, "wait_us": 22.0}), ("b#2", {}), ("unknown#7", {})]
)
def test_what_another_plan_s_steps_took_is_not_a_plan_s(
    name: str, expected: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning.core, "measured_plan", lambda: ("a#1", 1111.0, GIB, 22.0))
    assert planning._measured(name) == expected
