"""Kernels that take raw addresses: Triton asks each tensor for its `data_ptr`."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201  # Triton's own language
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(x_ptr + place, mask=inside)
    y = tl.load(y_ptr + place, mask=inside)
    tl.store(out_ptr + place, x + y, mask=inside)
