"""Objects from rank to rank, through the store of torch.distributed."""

from __future__ import annotations

import pickle
from typing import Any

from torch_lms.errors import PipelineError
from torch_lms.pipeline.liveness import Liveness
from torch_lms.ranks.circle import Circle

__all__ = ["Messages"]

_ANSWER_S = 1800.0  # the time that process groups give as a rule


class Messages:
    """Objects from rank to rank; whoever waits for one hears of failures meanwhile.

    Args:
        circle: the ranks.
        liveness: knows of failures.
    """

    def __init__(self, circle: Circle, liveness: Liveness) -> None:
        self._circle, self._liveness = circle, liveness
        self._gathered = 0

    @property
    def gathers(self) -> int:
        """How often `gather` was called, which is alike on all ranks."""
        return self._gathered

    def tell(self, key: str, value: Any) -> None:
        """Leaves an object for one other rank, or for several."""
        self._circle.put(key, pickle.dumps(value))

    def hear(self, key: str, teller: int, *, last: bool = True) -> Any:
        """Waits for an object.

        Args:
            key: that it was left under.
            teller: place of the rank that leaves it.
            last: whether no other rank will ask for it.

        Raises:
            PipelineError: if a rank fails meanwhile, the teller has closed its pipeline, or the object does not come in
                half an hour.
        """
        rank = self._circle.members.ranks[teller]

        def check() -> None:
            self._liveness.check()
            if self._liveness.has_closed(rank) and self._circle.find(key) is None:  # nothing comes after a goodbye
                raise PipelineError(
                    f"expected an answer of rank {rank}, found that it has closed its pipeline; call the pipeline on "
                    "all of its ranks alike"
                )

        found = self._circle.wait(key, _ANSWER_S, check)
        if found is None:
            raise PipelineError(
                f"expected an answer of rank {rank} in {_ANSWER_S:.0f} s, found none; call the pipeline on all of its "
                "ranks alike"
            )
        if last:
            self._circle.delete(key)
        return pickle.loads(found)

    def gather(self, value: Any) -> list[Any]:
        """Everyone's object, on everyone."""
        members = self._circle.members
        self._gathered += 1
        self.tell(f"gathered/{self._gathered}/{members.place}", value)
        told = [self.hear(f"gathered/{self._gathered}/{place}", place, last=False) for place in range(members.count)]
        if self._gathered > 1:  # who has told something now has heard all of the time before
            self._circle.delete(f"gathered/{self._gathered - 1}/{members.place}")
        return told
