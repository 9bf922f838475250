from __future__ import annotations

import pytest

from tests.every_op import OpInfo, check_forward_and_backward, check_in_place, name_of, ops_of

pytestmark = pytest.mark.slow  # all together; and chaos adds nothing to what they do themselves

OPS = ops_of("cpu")
compared: dict[str, int] = {}


@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_op_on_paged_out_tensors_is_bit_equal(op: OpInfo) -> None:
    count = check_forward_and_backward(op, "cpu", settled=True, most=2)
    check_forward_and_backward(op, "cpu", settled=False, most=1)
    check_in_place(op, "cpu", settled=True, most=1)
    compared[name_of(op)] = count


def test_most_ops_could_be_compared() -> None:
    if len(compared) < len(OPS):
        pytest.skip("counts only when every op has been tried")
    assert sum(count > 0 for count in compared.values()) > 0.9 * len(OPS)
