"""What the lean profile leaves out of a CUDA wheel is left out of the tests, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["in_full_builds"]

# By the profile's own word; by PyTorch's, where it finds a kernel in a table, or none for a kind of tensor.
MISSING = ("lean profile", "missing CUDA kernel", "from the 'SparseCUDA' backend")


@contextmanager
def in_full_builds() -> Iterator[None]:
    """Skips the test where one of PyTorch's functions is called that the build is without."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in MISSING):
            raise
        pytest.skip(f"the build has no such function: {str(error).splitlines()[0][:200]}")
