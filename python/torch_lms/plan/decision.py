"""What happens to one storage between two of its uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from torch_lms.errors import PlanError
from torch_lms.plan.trace import Trace

__all__ = [
    "DECISIONS",
    "DROP_UNCHANGED",
    "HOST",
    "KEEP",
    "RECOMPUTE",
    "SWAP",
    "Decision",
    "check_decisions",
]

KEEP = "keep"
SWAP = "swap"
RECOMPUTE = "recompute"
DROP_UNCHANGED = "drop_unchanged"
HOST = "host"
DECISIONS = (KEEP, SWAP, RECOMPUTE, DROP_UNCHANGED, HOST)
_COMING_BACK = (SWAP, DROP_UNCHANGED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One storage's way out and back. A storage may have several, one for each stretch without a use.

    Attributes:
        storage: its id in the trace.
        decision: keep, swap, recompute, drop_unchanged or host.
        out_after: the place after which it leaves; None if it is kept.
        in_after: the place after which its copy in may begin; None brings it in when it is used. One that is not
            greater than ``out_after`` lies in the next cycle.
    """

    storage: int
    decision: Annotated[str, DECISIONS]
    out_after: int | None = None
    in_after: int | None = None

    def __post_init__(self) -> None:
        if self.decision not in DECISIONS:
            raise PlanError(f"expected a decision among {', '.join(DECISIONS)}, found {self.decision!r}; correct it")
        if (self.out_after is None) != (self.decision == KEEP):
            raise PlanError(f"expected out_after for all but {KEEP}, found {self}; say after which place it leaves")
        if self.in_after is not None and self.decision not in _COMING_BACK:
            raise PlanError(f"expected in_after only for {' and '.join(_COMING_BACK)}, found {self}; set it to null")


def check_decisions(trace: Trace, decisions: Iterable[Decision]) -> None:
    """Checks that each decision can be carried out for its storage.

    Raises:
        PlanError: naming the first that cannot.
    """
    for given in decisions:
        if not 0 <= given.storage < len(trace.storages):
            raise PlanError(f"expected storages from 0 to {len(trace.storages) - 1}, found {given.storage}")
        storage = trace.storages[given.storage]
        for name, place in (("out_after", given.out_after), ("in_after", given.in_after)):
            if place is not None and not 0 <= place < len(trace.ops):
                raise PlanError(f"expected a place from 0 to {len(trace.ops) - 1} as {name}, found {given}")
        if given.decision != KEEP and not storage.movable:
            raise PlanError(f"expected a storage that can leave, found {given}: {storage.why_not_movable}; keep it")
        if given.decision == RECOMPUTE and storage.recompute is None:
            raise PlanError(f"expected a storage with a recipe, found {given}: {storage.why_not_recompute}; swap it")
        if given.decision == RECOMPUTE and (given.out_after or 0) < (storage.settled or 0):
            raise PlanError(f"expected a drop after place {storage.settled}, where its recipe begins, found {given}")
        if given.decision == DROP_UNCHANGED and (not storage.lasting or storage.writes):
            raise PlanError(f"expected a storage that lasts and that nothing writes, found {given}; swap it instead")
