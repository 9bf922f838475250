"""Where in the program the calling thread is: the module that runs, and the line of the user's code.

Note [Backward's places]: autograd gives each node that a forward op makes the thread's next number. So what runs inside
of a node belongs to the first op of the recorded forward that ended with a higher number.
"""

from __future__ import annotations

import ctypes
import os
import sys
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from operator import itemgetter
from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch import nn

__all__ = ["forget", "here"]

_NOT_THE_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)

_GET_VARIABLE: Callable[[FrameType, bytes], object] | None = None
if (3, 12) <= sys.version_info < (3, 13):
    _GET_VARIABLE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_char_p)(
        ("PyFrame_GetVarString", ctypes.pythonapi)
    )

_forwards: list[tuple[int, tuple[str, str]]] = []  # autograd's number after an op, and its place
_names: WeakKeyDictionary[nn.Module, dict[int, str]] = WeakKeyDictionary()
"""Of inner modules, by their identities, for each outer one: to walk a model takes long."""


def here() -> tuple[str, str]:
    """The innermost module's path from the outermost one that runs, and ``file:line`` of the user's code.

    Inside of a backward both are those of the forward op; see Note [Backward's places]. Empty where there are none.
    """
    modules, line = _in_frames()
    place = _path(modules), line
    node = torch._C._current_autograd_node()
    if node is None:
        _forwards.append((torch.autograd._get_sequence_nr(), place))
    elif not modules:  # nor a forward that is run again for this backward
        at = bisect_right(_forwards, node._sequence_nr(), key=itemgetter(0))
        return _forwards[at][1] if at < len(_forwards) else place
    return place


def forget() -> None:
    """A cycle has been recorded: backward's ops of another one are not asked for, and modules may change."""
    _forwards.clear()
    _names.clear()


def _in_frames() -> tuple[list[nn.Module], str]:
    """The modules that run, from the outermost one, and the line."""
    line = ""
    modules: list[nn.Module] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        filename = frame.f_code.co_filename
        if not line and not filename.startswith(_NOT_THE_USERS):
            line = f"{filename}:{frame.f_lineno}"
        owner = _self_of(frame) if frame.f_code.co_name == "forward" else None
        if isinstance(owner, nn.Module) and (not modules or modules[-1] is not owner):
            modules.append(owner)
        frame = frame.f_back
    return modules[::-1], line


def _self_of(frame: FrameType) -> object:
    """Its variable ``self``.

    Until Python 3.12 a frame that is asked for its locals keeps them all as they are then until it is asked again: what
    one op has used last is held for one op longer. Python 3.12 can be asked for one alone, and later ones keep nothing.
    """
    if _GET_VARIABLE is None:
        return frame.f_locals.get("self")
    try:
        return _GET_VARIABLE(frame, b"self")
    except NameError:
        return None


def _path(modules: list[nn.Module]) -> str:
    """From the outermost to the innermost, by the names that each has in the one before it."""
    names = [_name_in(outer, inner) for outer, inner in pairwise(modules)]
    return ".".join(name for name in names if name)


def _name_in(outer: nn.Module, inner: nn.Module) -> str:
    names = _names.get(outer)
    if names is None:
        names = _names[outer] = {id(module): name for name, module in outer.named_modules()}
    return names.get(id(inner)) or type(inner).__name__
