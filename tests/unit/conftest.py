"""Planners of these tests' programs begin quickly."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.unit.forked_planner import ForkedPlanner
from tests.unit.markers import CHAOS


@pytest.fixture(autouse=True, scope="module")
def _forked_planners() -> Iterator[None]:
    from torch_lms.swap import planner_process

    with pytest.MonkeyPatch.context() as patch:
        if not CHAOS:  # which begins in whatever imports torch_lms, and nothing that has begun may be forked
            patch.setattr(planner_process, "subprocess", SimpleNamespace(Popen=ForkedPlanner, PIPE=subprocess.PIPE))
        yield
