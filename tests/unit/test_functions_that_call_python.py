"""Functions that have a tensor's address, and call Python, which pages, before they go on through it."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.unit.foreign_code import load, needs_compiler
from torch_lms._core import core
from torch_lms.errors import PageoutError

KIB = 1 << 10
NUMEL = 64 * KIB
LIMIT_BYTES = 2 << 20


class Others:
    """Tensors of one and a half times the limit: whatever else may go out does when they are used."""

    def __init__(self, paged: ModuleType) -> None:
        paged.enable(limit={"cpu": LIMIT_BYTES}, min_bytes=4 * KIB)
        self.tensors = [torch.ones(NUMEL) for _ in range(12)]
        self.uses = 0

    def use(self) -> None:
        self.uses += 1
        for tensor in self.tensors:
            tensor.add_(1)

    def check(self) -> None:
        assert self.uses > 0
        assert all(torch.equal(tensor, torch.full_like(tensor, 1.0 + self.uses)) for tensor in self.tensors)


@pytest.fixture
def others(paged: ModuleType) -> Others:
    return Others(paged)


# --- constructors that ask each element of a list for its value ------------------------------------

CONSTRUCTORS: dict[str, Callable[[list[Any]], torch.Tensor]] = {
    "tensor": lambda data: torch.tensor(data, dtype=torch.float32),
    "as_tensor": lambda data: torch.as_tensor(data, dtype=torch.float32),
    "asarray": lambda data: torch.asarray(data, dtype=torch.float32),
    "new_tensor": lambda data: torch.zeros(1).new_tensor(data),
    "new": lambda data: torch.zeros(1).new(data),
    "Tensor": torch.Tensor,
    "FloatTensor": torch.FloatTensor,
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_elements_may_run_ops(name: str, others: Others) -> None:
    class Element:
        def __init__(self, value: int) -> None:
            self.value = value

        def __float__(self) -> float:
            if self.value % (NUMEL // 4) == 100:
                others.use()
            return float(self.value)

    made = CONSTRUCTORS[name]([Element(value) for value in range(NUMEL)])
    assert torch.equal(made, torch.arange(NUMEL, dtype=torch.float32))
    others.check()


def test_what_one_line_makes_again_and_again_may_go(others: Others) -> None:
    made = [torch.empty(NUMEL) for _ in range(24)]  # three times the limit
    for number, tensor in enumerate(made):
        tensor.fill_(number)
    assert [tensor[7].item() for tensor in made] == list(range(24))
    others.use()
    others.check()


# --- files -----------------------------------------------------------------------------------------


class File(io.BytesIO):
    """Calls something before each large part."""

    call: Callable[[], object] = staticmethod(lambda: None)

    def write(self, data: Any) -> int:  # type: ignore[override]
        if len(data) > KIB:
            self.call()
        return super().write(data)

    def readinto(self, into: Any) -> int:  # type: ignore[override]
        self.call()
        return super().readinto(into)


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("zipped", [False, True], ids=["legacy", "zip"])
def test_a_file_cannot_page_out_what_is_being_saved(zipped: bool, known: bool, paged: ModuleType) -> None:
    first, tensor = torch.zeros(NUMEL), torch.arange(512.0 * KIB)
    paged.pageout([first, tensor] if known else first)
    paged.wait()
    went = []
    file = File()
    file.call = lambda: (went.append(paged.pageout(tensor)), paged.wait(), torch.full_like(tensor, 7.0))
    torch.save(tensor, file, _use_new_zipfile_serialization=zipped)
    assert set(went) == {0}
    file.seek(0)
    assert torch.equal(torch.load(file), torch.arange(512.0 * KIB))
    assert paged.pageout(tensor) == 1


def test_a_slow_file_of_the_legacy_format_is_read(paged: ModuleType) -> None:
    source = {str(number): torch.full((NUMEL,), float(number)) for number in range(4)}
    file = File()
    torch.save(source, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    others = Others(paged)
    file.call = others.use
    found = torch.load(file)
    assert all(torch.equal(found[name], tensor) for name, tensor in source.items())
    others.check()


class Scripted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(256.0 * KIB))
        self.register_buffer("buffer", torch.arange(256.0 * KIB) * 2, persistent=False)
        self.plain = torch.arange(256.0 * KIB) * 3
        self.listed = [torch.arange(256.0 * KIB) * 4]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.weight + self.buffer + self.plain + self.listed[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_module_is_saved_beside_pageouts(paged: ModuleType) -> None:
    module = torch.jit.script(Scripted())
    tensors = [module.weight.detach(), module.buffer, module.plain, module.listed[0]]
    paged.pageout(tensors)
    paged.wait()
    stop = threading.Event()

    def move() -> None:
        while not stop.is_set():
            paged.pageout(tensors)
            paged.wait()
            paged.prefetch(tensors)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(25):
            found = torch.jit.load(io.BytesIO(module.save_to_buffer()))
            for times, tensor in enumerate((found.weight, found.buffer, found.plain, found.listed[0]), 1):
                assert torch.equal(tensor, torch.arange(256.0 * KIB) * times)
    finally:
        stop.set()
        mover.join()


# --- other extensions ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_compiler
class TestOtherExtensions:
    def test_what_a_function_makes_is_there_when_python_returns(self, paged: ModuleType) -> None:
        load()
        others = Others(paged)
        for value in range(4):
            assert torch.equal(load().made_around(NUMEL, value, others.use), torch.full((NUMEL,), float(value)))
        others.check()

    @pytest.mark.skipif(not core.has_materializer, reason="nothing tells of the address before PyTorch 2.13")
    @pytest.mark.parametrize("arrived", [False, True], ids=["out", "back"])
    def test_what_was_out_may_be_written_when_python_returns(self, arrived: bool, paged: ModuleType) -> None:
        load()
        others = Others(paged)
        tensor = torch.zeros(NUMEL)
        paged.pageout(tensor)
        paged.wait()
        if arrived:
            tensor.sum()
        load().written_around(tensor, 5.0, others.use)
        assert torch.equal(tensor, torch.full((NUMEL,), 5.0))
        others.check()

    @pytest.mark.parametrize("out", [False, True], ids=["resident", "out"])
    def test_what_dlpacks_table_lends_stays(self, out: bool, paged: ModuleType) -> None:
        first, tensor = torch.zeros(NUMEL), torch.arange(NUMEL, dtype=torch.float32)
        expected = tensor.sum(dtype=torch.float64).item()
        paged.pageout([first, tensor] if out else first)
        paged.wait()
        went: list[int] = []

        def page_out() -> None:
            other = threading.Thread(target=lambda: went.append(paged.pageout(tensor)))
            other.start()
            other.join()

        assert load().lent_sum(tensor, page_out) == expected
        assert went == [0]
        torch.ones(1).sum()
        assert paged.pageout(tensor) == 1  # lent for a call alone

    @pytest.mark.parametrize("out", [False, True], ids=["resident", "out"])
    def test_what_dlpacks_table_hands_out_stays_for_good(self, out: bool, paged: ModuleType) -> None:
        first, tensor = torch.zeros(NUMEL), torch.arange(NUMEL, dtype=torch.float32)
        expected = tensor.sum(dtype=torch.float64).item()
        paged.pageout([first, tensor] if out else first)
        paged.wait()
        assert load().handed_out_sum(tensor, lambda: None) == expected
        with pytest.raises(PageoutError, match="pinned"):
            paged.pageout(tensor)
