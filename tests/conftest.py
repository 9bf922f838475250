"""What every test is given: paging that is settled before it, and again after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.quickly import begin_quickly

CHAOS = os.environ.get("TORCH_LMS_CHAOS") == "1"


def pytest_collection_finish() -> None:
    """Where tests run, which is not where others are told to run them; what is there by now stays to the end."""
    begin_quickly()


def settle() -> None:
    """Automatic mode off, the MLMS environment closed, queues drained, everything resident."""
    from torch_lms._core import core
    from torch_lms.swap import automatic, chaos, manual, mlms

    automatic.disable()
    if mlms._env_open:
        mlms.close_swap_env()
    try:
        manual.wait()
    finally:
        core.pagein_all()
        chaos.enable_from_environment()  # automatic mode's end was its end too; and each test begins with the seed


@pytest.fixture(autouse=True)
def settled_afterwards() -> Iterator[None]:
    """Nothing is left behind; costs nothing where a test has not paged."""
    yield
    if "torch_lms.swap" in sys.modules:
        settle()


@pytest.fixture
def paged() -> ModuleType:
    """`torch_lms`, settled, with its counters at zero."""
    import torch_lms

    settle()
    torch_lms.stats(reset=True)
    return torch_lms


@pytest.fixture
def chaos() -> bool:
    """Whether storages go out at random: then no state and no counter is a test's own."""
    return CHAOS
