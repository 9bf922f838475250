"""What the code of a stage calls for segments that it gives up until their backward: to compute them again, or to swap.

Both give the results of the plain code, to the bit. See `torch_lms.partition.segments` for what a segment is.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from torch_lms._torch_compat import storage_key, tree_flatten
from torch_lms.errors import PageoutError

if TYPE_CHECKING:
    from torch_lms.stages.stage import Stage

__all__ = ["Swaps", "can_swap", "recomputed"]

Segment = Callable[..., Any]
_WAITING: WeakKeyDictionary[Stage, deque[ref[Swaps]]] = WeakKeyDictionary()  # forwards without their backward


def can_swap() -> bool:
    """Whether the compiled core is there."""
    try:
        import torch_lms._core  # noqa: F401  # whether it loads is what is asked
    except ImportError:
        return False
    return True


def recomputed(segment: Segment, stage: Stage, *values: Any) -> Any:
    """Runs a segment, forgets what it saved, and runs it again when its backward begins."""
    if not torch.is_grad_enabled():
        return segment(stage, *values)
    return checkpoint(segment, stage, *values, use_reentrant=False)


class Swaps:
    """The swapped segments of one forward of a stage.

    What a segment saves goes out when its forward is over. Backward asks for the segments last to first: when it begins
    with one, the next one comes back; at the end of this forward's segments that is the last one of the oldest forward
    that still waits for its backward. Backward may run in another thread than forward, but not at once with it.

    Args:
        stage: whose forward begins.
    """

    def __init__(self, stage: Stage) -> None:
        self.segments: list[_Swapped] = []
        self._forwards = _WAITING.setdefault(stage, deque())
        if torch.is_grad_enabled():
            self._forwards.append(ref(self, self._forwards.remove))

    def run(self, segment: Segment, stage: Stage, *values: Any) -> Any:
        """Runs a segment and has what it saved go out."""
        if not torch.is_grad_enabled():
            return segment(stage, *values)
        swapped = _Swapped(self)
        with saved_tensors_hooks(swapped.pack, swapped.unpack):
            result = segment(stage, *values)
        self.segments.append(swapped)
        swapped.leave([*_tensors((values, result)), *stage.parameters(), *stage.buffers()])
        return result

    def next_after(self, segment: _Swapped) -> _Swapped | None:
        """The segment whose backward comes next."""
        place = self.segments.index(segment)
        if place > 0:
            return self.segments[place - 1]
        others = (found() for found in tuple(self._forwards))
        ends = (other.segments[-1] for other in others if other not in (None, self) and other.segments)
        return next((end for end in ends if not end.begun), None)  # of two parts of a backward one may be to come


class _Swapped:
    """What one segment saved in one forward; the graph keeps it, and no one else.

    Attributes:
        begun: whether its backward has.
    """

    def __init__(self, forward: Swaps) -> None:
        self._forward = forward
        self._saved: list[ref[torch.Tensor]] = []
        self.begun = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Notes what is saved. An alias goes to the graph, which would else hold itself where it saves an output."""
        alias = tensor.detach()
        self._saved.append(ref(alias))
        return alias

    def unpack(self, alias: torch.Tensor) -> torch.Tensor:
        """Backward begins with this segment, or goes on."""
        if not self.begun:
            self.begun = True
            self.come_back()
            following = self._forward.next_after(self)
            if following is not None:
                following.come_back()
        return alias

    def leave(self, staying: list[torch.Tensor]) -> None:
        """Pages out what no border of the segment carries and no parameter is."""
        from torch_lms.swap.manual import pageout

        seen = {storage_key(tensor) for tensor in staying}
        for tensor in self._alive():
            key = storage_key(tensor)
            if key in seen:
                continue
            seen.add(key)
            try:
                pageout(tensor)
            except PageoutError as error:
                warnings.warn(f"a saved tensor stays on the device: {error}", stacklevel=2)

    def come_back(self) -> None:
        """Has what is out come back; what is there stays."""
        from torch_lms.swap.manual import prefetch

        prefetch(list(self._alive()))

    def _alive(self) -> Iterator[torch.Tensor]:
        return (tensor for tensor in (found() for found in self._saved) if tensor is not None)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]
