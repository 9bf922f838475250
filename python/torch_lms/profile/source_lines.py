"""Which line of the user's code an error comes from."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

import torch

from torch_lms import _torch_compat as torch_compat

__all__ = ["blame", "calling_line", "first_line"]

_OURS = tuple(str(Path(torch_compat.__file__).parent / name) for name in ("_torch_compat.py", "fitting", "profile"))
_TORCH = str(Path(torch.__file__).parent)


def blame(error: BaseException) -> str:
    """The innermost line that is neither PyTorch's nor this package's, as ``file:line: code``; may be empty."""
    return _last_of_users(traceback.extract_tb(error.__traceback__))


def calling_line() -> str:
    """The same of the call that is under way."""
    return _last_of_users(traceback.extract_stack())


def _last_of_users(frames: traceback.StackSummary) -> str:
    found = ""
    for frame in frames:
        if frame.filename.startswith((*_OURS, _TORCH, "<")) or frame.lineno is None:
            continue
        if _is_library(frame.filename):
            continue
        line = linecache.getline(frame.filename, frame.lineno).strip()
        found = f"{frame.filename}:{frame.lineno}: {line}"
    return found


def first_line(error: BaseException) -> str:
    """The error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _is_library(filename: str) -> bool:
    """Whether a file belongs to Python itself."""
    return filename.startswith(str(Path(traceback.__file__).parent)) and "site-packages" not in filename
