from __future__ import annotations

import pytest
import torch

from tests.every_op import OpInfo, check_forward_and_backward, check_in_place, name_of, ops_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPS = ops_of("cuda") if torch.cuda.is_available() else []


@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_op_on_paged_out_tensors_is_bit_equal(op: OpInfo) -> None:
    check_forward_and_backward(op, "cuda", settled=True, most=1)
    check_in_place(op, "cuda", settled=False, most=1)
