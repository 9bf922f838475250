"""What is larger than all that comes and goes in a cycle stays, where that costs little."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.traces import Program, gpt_trace
from torch_lms.plan.decision import KEEP
from torch_lms.plan.document import Plan
from torch_lms.plan.least import least_limit
from torch_lms.plan.pieces import Request, plan_in_pieces
from torch_lms.plan.simulator import simulate
from torch_lms.plan.trace import Trace

MIB = 1 << 20
LAYERS = 24
EMBEDDING_BYTES = 200 * MIB


def inference(*, weight_bytes: int = 64 * MIB, made_bytes: int = 32 * MIB) -> Trace:
    """An embedding, then layers of one weight each; each op makes what the next one reads."""
    program = Program()
    weights = [program.lasting(EMBEDDING_BYTES), *(program.lasting(weight_bytes) for _ in range(LAYERS))]
    made: list[int] = []
    for weight in weights:
        before, made = made, program.op("aten::mm", 1500.0, reads=(weight, *made), makes=(made_bytes,))
        program.release(*before)
    program.release(*made)
    return program.trace()


def request(trace: Trace, limit_bytes: int) -> Request:
    return Request(trace=trace, limit_bytes=limit_bytes, margin_bytes=32 * MIB, pieces_bytes=EMBEDDING_BYTES)


def moves_embedding(plan: Plan) -> bool:
    return any(one.storage == 0 and one.decision != KEEP for one in plan.decisions)


def test_the_largest_weight_stays_and_less_has_to_be_free() -> None:
    plan = plan_in_pieces(request(inference(), 1400 * MIB), simply=True)
    assert not moves_embedding(plan)
    assert plan.limit_bytes == (1400 - 32 - 64) * MIB
    assert "larger than all that comes and goes" in next(one.reason for one in plan.decisions if one.storage == 0)


def test_it_leaves_where_ops_would_read_weights_from_the_host_without() -> None:
    assert moves_embedding(plan_in_pieces(request(inference(), 300 * MIB), simply=False))


def test_it_leaves_where_the_step_would_take_much_longer_without() -> None:
    asked = request(inference(weight_bytes=80 * MIB), 500 * MIB)
    assert asked.keeping_the_largest is not None
    kept_us = plan_in_pieces(asked.keeping_the_largest, simply=True).predicted.step_us
    plan = plan_in_pieces(asked, simply=False)
    assert moves_embedding(plan)
    assert plan.predicted.step_us * 1.04 < kept_us


def test_a_first_plan_does_not_wait_for_the_comparison() -> None:
    plan = plan_in_pieces(request(inference(weight_bytes=80 * MIB), 500 * MIB), simply=True)
    assert not moves_embedding(plan)


@pytest.mark.parametrize("simply", [True, False])
def test_where_no_plan_leaves_so_much_free_it_leaves_some_of_what_it_can(simply: bool) -> None:
    trace, margin_bytes = gpt_trace(layers=8), 512 * MIB
    least_bytes, limit_bytes = least_limit(trace), simulate(trace, []).peak_bytes * 2 // 3
    asked = Request(trace=trace, limit_bytes=limit_bytes, margin_bytes=margin_bytes, pieces_bytes=limit_bytes * 5 // 6)
    plan = plan_in_pieces(asked, simply=simply)
    assert least_bytes < plan.limit_bytes < limit_bytes - margin_bytes


def test_what_is_as_small_as_what_is_made_may_leave() -> None:
    assert request(inference(made_bytes=EMBEDDING_BYTES), 1600 * MIB).keeping_the_largest is None


def test_memory_in_one_piece_has_no_need_of_it() -> None:
    assert replace(request(inference(), 1400 * MIB), pieces_bytes=0).keeping_the_largest is None
