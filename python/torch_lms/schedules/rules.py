"""The rules that make schedules: GPipe, 1F1B, and 1F1B with several stages on each rank (interleaved).

With two stages and four microbatches, time from left to right:

    gpipe   rank 0  F0 F1 F2 F3          B0 B1 B2 B3
            rank 1     F0 F1 F2 F3 B0 B1 B2 B3
    1f1b    rank 0  F0 F1    B0 F2 B1 F3 B2    B3
            rank 1     F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_lms.errors import PipelineError
from torch_lms.schedules.actions import BACKWARD, FORWARD, Action, Schedule

__all__ = ["gpipe", "interleaved", "make_schedule", "one_f_one_b"]


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
    per_round, local = microbatches // rounds, stages // ranks
    return Schedule.of(
        "interleaved", [_interleave(rank, ranks, local, per_round, microbatches) for rank in range(ranks)]
    )


def _interleave(rank: int, ranks: int, local: int, per_round: int, microbatches: int) -> list[Action]:
    total = microbatches * local
    ahead = min(total, (local - 1) * per_round + 2 * (ranks - 1 - rank))
    done = {kind: [0] * local for kind in (FORWARD, BACKWARD)}

    def next_of(kind: str) -> Action:
        place = (sum(done[kind]) // per_round) % local
        place = place if kind == FORWARD else local - 1 - place
        done[kind][place] += 1
        return Action(place * ranks + rank, kind, done[kind][place] - 1)

    actions = [next_of(FORWARD) for _ in range(ahead)]
    for step in range(total):
        if step + ahead < total:
            actions.append(next_of(FORWARD))
        actions.append(next_of(BACKWARD))
    return actions


def _check(stages: int, microbatches: int) -> None:
    if stages < 1 or microbatches < 1:
        raise PipelineError(f"expected at least one stage and one microbatch, found {stages} and {microbatches}")


_SINGLE: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def make_schedule(name: str, *, ranks: int, stages: int, microbatches: int) -> Schedule:
    """The schedule of that name.

    Raises:
        PipelineError: for an unknown name, or more stages on a rank than the rule knows.
    """
    if name == "interleaved":
        return interleaved(ranks, stages, microbatches)
    if name not in _SINGLE:
        raise PipelineError(f"expected a schedule among {_names([*_SINGLE, 'interleaved'])}, found {name!r}")
    if ranks != stages:
        raise PipelineError(
            f"expected one stage on each rank for {name}, found {stages} stages on {ranks} ranks; "
            "take 'interleaved' or another number of stages"
        )
    return _SINGLE[name](stages, microbatches)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names)
