"""States of tensors in chunks.

Source: PatrickStar (arXiv 2108.05818). The diagram and the table stand in this package's README.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from torch_lms.errors import ChunkError

__all__ = ["LEGAL", "TensorState", "TensorStates"]


class TensorState(Enum):
    """What a tensor's bytes are, and who needs them."""

    FREE = "free"
    """They mean nothing: others may have the memory."""
    COMPUTE = "compute"
    """An op is about to use them, or is using them."""
    HOLD = "hold"
    """They are kept for later."""
    HOLD_AFTER_FWD = "hold after forward"
    """They are kept for backward: this forward is over for them."""
    HOLD_AFTER_BWD = "hold after backward"
    """They are the gradient, kept for the optimizer."""


_FREE, _COMPUTE, _HOLD = TensorState.FREE, TensorState.COMPUTE, TensorState.HOLD
_AFTER_FWD, _AFTER_BWD = TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD

LEGAL: dict[TensorState, frozenset[TensorState]] = {
    _FREE: frozenset({_HOLD, _AFTER_BWD}),
    _HOLD: frozenset({_COMPUTE, _FREE}),
    _COMPUTE: frozenset({_HOLD, _AFTER_FWD}),
    _AFTER_FWD: frozenset({_COMPUTE, _HOLD}),
    _AFTER_BWD: frozenset({_FREE}),
}
"""From each state, those that may follow."""


class TensorStates:
    """The states of a model's tensors. All hold their initial bytes when it is made.

    Not thread-safe: the owner's lock guards it.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._states = [_HOLD] * len(self._names)
        self._accesses = [0] * len(self._names)

    def __getitem__(self, tensor: int) -> TensorState:
        return self._states[tensor]

    def __len__(self) -> int:
        return len(self._states)

    def access(self, tensor: int) -> None:
        """Somebody is about to compute with it. Others may be doing so, too: modules may share a parameter."""
        if self._accesses[tensor] == 0:
            self._move(tensor, _COMPUTE)
        self._accesses[tensor] += 1

    def release(self, tensor: int, state: TensorState) -> None:
        """One that has accessed it is done; the last one's `state` follows.

        Args:
            tensor: its number.
            state: HOLD_AFTER_FWD after a forward, HOLD else.

        Raises:
            ChunkError: if nobody has accessed it, or `state` cannot follow.
        """
        if self._accesses[tensor] == 0:
            raise ChunkError(
                f"expected an access of {self._names[tensor]} before its release, found none; this is an error of "
                "torch_lms: please report it"
            )
        if self._accesses[tensor] == 1:
            self._move(tensor, state)
        self._accesses[tensor] -= 1

    def forget_accesses(self) -> None:
        """Nobody computes: what has not been released is of somebody who was interrupted."""
        for tensor, state in enumerate(self._states):
            if state is _COMPUTE:
                self._states[tensor] = _HOLD
            self._accesses[tensor] = 0

    def free(self, tensor: int) -> None:
        """Its bytes mean nothing from now on, whatever they have been."""
        if self._states[tensor] is _AFTER_FWD:
            self.move(tensor, _HOLD)
        if self._states[tensor] is not _FREE:
            self.move(tensor, _FREE)

    def move(self, tensor: int, *states: TensorState) -> None:
        """To one state after the other, without computing.

        Raises:
            ChunkError: where one cannot follow.
        """
        for state in states:
            if state is _COMPUTE or self._accesses[tensor]:
                raise self._illegal(tensor, state)
            self._move(tensor, state)

    def _move(self, tensor: int, state: TensorState) -> None:
        if state not in LEGAL[self._states[tensor]]:
            raise self._illegal(tensor, state)
        self._states[tensor] = state

    def _illegal(self, tensor: int, state: TensorState) -> ChunkError:
        if self._accesses[tensor]:
            return ChunkError(
                f"expected {self._names[tensor]} to be used by no module, found {self._accesses[tensor]} that run, on "
                "this thread or on another; let them end before optimizer.step() and zero_grad()"
            )
        found = self._states[tensor]
        may = ", ".join(sorted(one.name for one in LEGAL[found]))
        return ChunkError(
            f"expected {self._names[tensor]} to go from {found.name} to one of {may}, found {state.name}; this "
            "is an error of torch_lms: please report it"
        )
