"""Where in the program the calling thread is: the module that runs, and the line of the user's code."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from types import FrameType

import torch
from torch import nn

__all__ = ["here"]

_NOT_THE_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


def here() -> tuple[str, str]:
    """The innermost module's path from the outermost one that runs, and ``file:line`` of the user's code.

    Both are empty outside of them, as on the threads of autograd's engine.
    """
    line = ""
    modules: list[nn.Module] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        filename = frame.f_code.co_filename
        if not line and not filename.startswith(_NOT_THE_USERS):
            line = f"{filename}:{frame.f_lineno}"
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(owner, nn.Module) and (not modules or modules[-1] is not owner):
            modules.append(owner)
        frame = frame.f_back
    return _path(modules[::-1]), line


def _path(modules: list[nn.Module]) -> str:
    """From the outermost to the innermost, by the names that each has in the one before it."""
    names = [_name_in(outer, inner) for outer, inner in pairwise(modules)]
    return ".".join(name for name in names if name)


def _name_in(outer: nn.Module, inner: nn.Module) -> str:
    names = (name for name, module in outer.named_modules() if module is inner)
    return next(names, type(inner).__name__)
