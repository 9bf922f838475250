"""Programs that say how exact 32-bit products are to be are planned, and what is made again has their bits."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.test_plans import limit_for, on, plain_training, run
from tests.unit.trainings import one_thread
from torch_lms.swap.planning import last_trace

PLANNED_WITHIN_S = 150


@one_thread()
def planned_with(backend: str, precision: str) -> tuple[bool, bool, bool, str]:
    """Whether the bits are right, some op can be run again, and the switch is as it was; and what was logged."""
    switches = getattr(torch.backends, backend).matmul
    switches.fp32_precision = precision
    limit_bytes = limit_for(plain_training)
    expected, equal = list(run(plain_training)), True
    with tempfile.TemporaryFile() as said:
        before = os.dup(2)
        os.dup2(said.fileno(), 2)  # PyTorch logs what a callback throws
        on(limit_bytes)
        for made, same in zip(run(plain_training), expected, strict=True):
            equal = equal and made == same
            if last_trace() is not None:
                break
        os.dup2(before, 2)
        said.seek(0)
        text = said.read().decode(errors="replace")
    trace = last_trace()
    can_be_made = trace is not None and any(storage.recompute is not None for storage in trace.storages)
    torch_lms.disable()
    return equal, can_be_made, switches.fp32_precision == precision, text


@counts_exactly
@pytest.mark.parametrize(("backend", "precision"), [("cuda", "tf32"), ("mkldnn", "bf16")])
def test_a_program_that_sets_the_precision_of_one_backend_is_planned(backend: str, precision: str) -> None:
    equal, can_be_made, kept, said = in_fresh_process(planned_with, backend, precision, within_s=PLANNED_WITHIN_S)
    assert equal
    assert can_be_made
    assert kept
    assert "Exception in" not in said
