"""The rules that make schedules: GPipe, 1F1B, 1F1B with several stages on each rank (interleaved), and zero bubble.

With two stages and four microbatches, time from left to right:

    gpipe   rank 0  F0 F1 F2 F3          B0 B1 B2 B3
            rank 1     F0 F1 F2 F3 B0 B1 B2 B3
    1f1b    rank 0  F0 F1    B0 F2 B1 F3 B2    B3
            rank 1     F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

from collections.abc import Callable

from torch_lms.errors import PipelineError
from torch_lms.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action, Schedule

__all__ = [
    "ONE_STAGE_EACH",
    "SCHEDULES",
    "gpipe",
    "interleaved",
    "make_schedule",
    "one_f_one_b",
    "splits_backward",
    "zero_bubble",
]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Source: Huang et al. 2019, figure 2c.
    """
    _check(stages, microbatches)
    ranks = [
        [Action(stage, kind, microbatch) for kind in (FORWARD, BACKWARD) for microbatch in range(microbatches)]
        for stage in range(stages)
    ]
    return Schedule.of("gpipe", ranks)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Stage s runs ``stages - s`` forwards ahead, then a backward and a forward in turn: fewer microbatches in flight.

    Source: Narayanan et al. 2019 (PipeDream), flushed at the end of each step as in PipeDream-Flush.
    """
    _check(stages, microbatches)
    return Schedule.of(
        "1f1b", [_alternate(stage, min(microbatches, stages - stage), microbatches) for stage in range(stages)]
    )


def _alternate(stage: int, ahead: int, microbatches: int) -> list[Action]:
    actions = [Action(stage, FORWARD, microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches):
        actions.append(Action(stage, BACKWARD, microbatch))
        if microbatch + ahead < microbatches:
            actions.append(Action(stage, FORWARD, microbatch + ahead))
    return actions


def interleaved(ranks: int, stages: int, microbatches: int) -> Schedule:
    """1F1B where rank r has the stages r, r + ranks, r + 2 ranks and so on: smaller bubbles, more transfers.

    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2.

    Raises:
        PipelineError: if the ranks do not divide the stages, or rounds of as many microbatches as ranks do not fill.
    """
    per_round = _per_round(ranks, stages, microbatches)
    local = stages // ranks
    return Schedule.of(
        "interleaved", [_interleave(_Turns(rank, ranks, local, per_round), microbatches) for rank in range(ranks)]
    )


def zero_bubble(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Interleaved, with each backward in two: rank r does the weights' part r backwards after the inputs' part.

    The gradients of inputs reach the rank before sooner, and the weights' parts fill what would be a bubble; half as
    many forwards run ahead. Ranks are those of `interleaved`.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", schedule ZB-H1; the order is that of
    torch.distributed.pipelining's ScheduleInterleavedZeroBubble.

    Raises:
        PipelineError: as `interleaved`.
    """
    per_round = _per_round(ranks, stages, microbatches)
    local = stages // ranks
    return Schedule.of(
        "zero_bubble", [_fill_bubbles(_Turns(rank, ranks, local, per_round), microbatches) for rank in range(ranks)]
    )


def _per_round(ranks: int, stages: int, microbatches: int) -> int:
    _check(stages, microbatches)
    if ranks < 1 or stages % ranks:
        raise PipelineError(
            f"expected stages that the ranks divide, found {stages} stages on {ranks} ranks; change one"
        )
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise PipelineError(
            f"expected microbatches in {rounds} equal rounds, found {microbatches}; "
            f"take a multiple of the {ranks} ranks"
        )
    return microbatches // rounds


class _Turns:
    """Whose turn it is on a rank: a round of microbatches in one of its stages, then in the next."""

    def __init__(self, rank: int, ranks: int, local: int, per_round: int) -> None:
        self.rank, self.ranks, self.local, self.per_round = rank, ranks, local, per_round
        self._done: dict[str, list[int]] = {}

    def next_of(self, kind: str) -> Action:
        """The next action of a kind; backwards begin with the last stage."""
        done = self._done.setdefault(kind, [0] * self.local)
        place = (sum(done) // self.per_round) % self.local
        place = place if kind == FORWARD else self.local - 1 - place
        done[place] += 1
        return Action(place * self.ranks + self.rank, kind, done[place] - 1)


def _interleave(turns: _Turns, microbatches: int) -> list[Action]:
    total = microbatches * turns.local
    ahead = min(total, (turns.local - 1) * turns.per_round + 2 * (turns.ranks - 1 - turns.rank))
    actions = [turns.next_of(FORWARD) for _ in range(ahead)]
    for step in range(total):
        if step + ahead < total:
            actions.append(turns.next_of(FORWARD))
        actions.append(turns.next_of(BACKWARD))
    return actions


def _fill_bubbles(turns: _Turns, microbatches: int) -> list[Action]:
    total = microbatches * turns.local
    ahead = min(total, (turns.local - 1) * turns.per_round + turns.ranks - 1 - turns.rank)
    actions = [turns.next_of(FORWARD) for _ in range(ahead)]
    for step in range(total):
        if step + ahead < total:
            actions.append(turns.next_of(FORWARD))
        actions.append(turns.next_of(INPUT_BACKWARD))
        if step >= turns.rank:
            actions.append(turns.next_of(WEIGHT_BACKWARD))
    return actions + [turns.next_of(WEIGHT_BACKWARD) for _ in range(min(turns.rank, total))]


def _check(stages: int, microbatches: int) -> None:
    if stages < 1 or microbatches < 1:
        raise PipelineError(f"expected at least one stage and one microbatch, found {stages} and {microbatches}")


_SINGLE: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
_SEVERAL: dict[str, Callable[[int, int, int], Schedule]] = {"interleaved": interleaved, "zero_bubble": zero_bubble}
ONE_STAGE_EACH = tuple(_SINGLE)  # on each rank; the others have several
SCHEDULES = (*_SINGLE, *_SEVERAL)


def splits_backward(name: str) -> bool:
    """Whether the gradients of inputs and those of weights have a backward each."""
    return name == "zero_bubble"


def make_schedule(name: str, *, ranks: int, stages: int, microbatches: int) -> Schedule:
    """The schedule of that name.

    Raises:
        PipelineError: for an unknown name, or more stages on a rank than the rule knows.
    """
    if name in _SEVERAL:
        return _SEVERAL[name](ranks, stages, microbatches)
    if name not in _SINGLE:
        raise PipelineError(f"expected a schedule among {', '.join(SCHEDULES)}, found {name!r}")
    if ranks != stages:
        raise PipelineError(
            f"expected one stage on each rank for {name}, found {stages} stages on {ranks} ranks; "
            f"take {' or '.join(map(repr, _SEVERAL))} or another number of stages"
        )
    return _SINGLE[name](stages, microbatches)
