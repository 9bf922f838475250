"""The one module that chooses the runtime: that of the fork, where PyTorch is the fork, or the compiled extension.

`core` has the functions of ``_C.pyi``. What the two differ in for the modules above stands here, too.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch  # loads the libraries that the extension is linked against

from torch_lms import _fork

if TYPE_CHECKING:
    from torch_lms import _C as core  # noqa: N811  # a module

__all__ = ["core", "need_extension", "sees_every_access"]


def _load_fork() -> ModuleType:
    if not _fork.is_complete():
        raise ImportError(
            f"torch_lms: expected a PyTorch with the fork's patches of this version, found {torch.__version__} with "
            "earlier ones; build it again: bash build_scripts/build_wheel.sh --help"
        )
    return _fork


def _load_extension() -> ModuleType:
    try:
        from torch_lms import _C
    except ImportError as error:
        raise ImportError(
            "torch_lms: expected its compiled core (torch_lms._C), found none that loads with this PyTorch: "
            f"{error}. Install torch_lms against the PyTorch that is here: "
            "pip install --no-build-isolation . (or, in place, python setup.py build_ext --inplace)"
        ) from error
    return _C


_on_fork = _fork.is_here()
if not TYPE_CHECKING:
    core = _load_fork() if _on_fork else _load_extension()

sees_every_access: bool = _on_fork
"""Whether raw access to a storage pages in without being watched for."""


def need_extension(what: str, instead: str) -> None:
    """Raises what the fork's runtime has no substitute for.

    Args:
        what: was asked for.
        instead: what to do.

    Raises:
        LmsError: on the fork.
    """
    if _on_fork:
        _fork.refuse(what, instead)
