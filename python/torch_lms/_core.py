"""The one module that imports the compiled core."""

from __future__ import annotations

import torch  # noqa: F401  # loads the libraries that the core is linked against

try:
    from torch_lms import _C
except ImportError as error:
    raise ImportError(
        "torch_lms: expected its compiled core (torch_lms._C), found none that loads with this PyTorch: "
        f"{error}. Install torch_lms against the PyTorch that is here: "
        "pip install --no-build-isolation . (or, in place, python setup.py build_ext --inplace)"
    ) from error

__all__ = ["core"]

core = _C
