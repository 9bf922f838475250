"""Host memory that a GPU copies from and to by itself, as much as is asked for and no more.

PyTorch's own allocator of pinned memory takes powers of two, and keeps what is freed.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from torch_lms.errors import ChunkError

__all__ = ["pinned_zeros"]


class _PinnedMemory(mmap.mmap):
    """Anonymous memory, pinned until nobody has it any more."""

    pinned_at = 0

    def __del__(self) -> None:
        """Unpins it: a tensor of it keeps it alive."""
        if self.pinned_at:
            torch.cuda.cudart().cudaHostUnregister(self.pinned_at)


def pinned_zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of zeros in pinned memory.

    Raises:
        ChunkError: if it cannot be pinned.
    """
    nbytes = max(1, numel * dtype.itemsize)
    memory = _PinnedMemory(-1, nbytes)
    with suppress(OSError):  # not every kernel has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    made = torch.frombuffer(memory, dtype=dtype, count=numel).zero_() if numel else torch.empty(0, dtype=dtype)
    if numel:
        status = int(torch.cuda.cudart().cudaHostRegister(made.data_ptr(), nbytes, 0))
        if status:
            raise ChunkError(
                f"expected to pin {nbytes} bytes of host memory, found CUDA's error {status}; lower host_limit, or "
                "free host memory"
            )
        memory.pinned_at = made.data_ptr()
    return made
