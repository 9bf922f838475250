"""What the lean profile leaves out of a CUDA wheel is left out of the tests, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["in_full_builds"]


@contextmanager
def in_full_builds() -> Iterator[None]:
    """Skips the test where one of PyTorch's functions is called that the build is without."""
    try:
        yield
    except RuntimeError as error:
        if "lean profile" not in str(error):
            raise
        pytest.skip(str(error).splitlines()[0])
