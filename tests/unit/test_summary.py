"""The table of what holds a device's memory."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import torch_lms
from tests.unit.markers import counts_exactly
from torch_lms import _core, _fork
from torch_lms._core import core
from torch_lms.errors import LimitError, LmsError
from torch_lms.swap.summary import _PARTS, _TOTALS

BLOCK_BYTES = 4 << 20


def figures(text: str) -> dict[str, float]:
    """The figure of each line that has one, by its words."""
    lines = [line.rsplit(maxsplit=1) for line in text.splitlines() if line]
    return {line[0].strip(): float(line[1]) for line in lines if line[1].replace(".", "").isdigit()}


def blocks(count: int) -> list[torch.Tensor]:
    return [torch.ones(BLOCK_BYTES // 4) for _ in range(count)]


def test_every_kind_of_a_report_has_a_line() -> None:
    assert {*_TOTALS, *_PARTS} == set(core.memory_report("cpu"))


@counts_exactly
def test_the_table_says_what_holds_the_memory(paged: ModuleType) -> None:
    paged.enable({"cpu": "64MiB"}, min_bytes=4096)
    before = figures(paged.memory_summary("cpu"))
    kept = blocks(3)
    paged.pin(kept[0])
    found = figures(paged.memory_summary("cpu"))
    assert found[_TOTALS["limit_bytes"]] == 64
    grown = {words: round(found[words] - before[words], 1) for words in found}  # a table has one decimal
    assert grown[_PARTS["fixed_bytes"]] == 4
    assert grown[_PARTS["movable_bytes"]] == 8
    assert grown[_TOTALS["allocated_bytes"]] == 12
    assert all(found[words] == before[words] for words in (_PARTS["leaving_bytes"], _PARTS["in_use_bytes"]))
    paged.swap.unpin(kept[0])


@counts_exactly
def test_the_table_says_what_is_on_the_host(paged: ModuleType) -> None:
    before = figures(paged.memory_summary())["paged out to the host, from all devices"]
    kept = blocks(2)
    paged.pageout(kept)
    paged.wait()
    assert figures(paged.memory_summary())["paged out to the host, from all devices"] == pytest.approx(before + 8)


def test_the_table_says_whether_automatic_mode_is_on() -> None:
    assert "automatic mode is off" in torch_lms.memory_summary()
    torch_lms.enable({"cpu": "1GiB"})
    assert "automatic mode is on" in torch_lms.memory_summary(torch.device("cpu"))
    torch_lms.disable()
    assert "none" in torch_lms.memory_summary("cpu")


@pytest.mark.parametrize("device", ["xpu:0", "nothing", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(LimitError):
        torch_lms.memory_summary(device)


def test_the_forks_runtime_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "_on_fork", True)
    with pytest.raises(LmsError, match=r"torch_lms\.stats"):
        torch_lms.memory_summary()
    assert not _fork.is_here()
