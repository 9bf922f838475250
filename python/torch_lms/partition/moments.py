"""How many microbatches a device holds while each of its actions runs, by how far they are.

Note [Half done]: between the two parts of its backward a microbatch holds something else than before. The backward of
inputs keeps a gradient wherever weights meet values (`torch.distributed.pipelining`, ``stage_backward_input``), until
the backward of weights has used it. And it ends what the stage holds only to get back to the last such place: what
comes after that, such as a loss, is freed. So a stage holds its ``left_bytes`` of each microbatch in flight, its
``freed_bytes`` of those that are not half done, and its ``kept_bytes`` of those that are in a backward of inputs or
past it. While that runs a microbatch has all three; but the gradients come one after the other, and the working space
of a node is there when those of the nodes before it are not. So working space counts in that part only as far as it is
more than what is kept later (``input_transient_bytes``).
"""

from __future__ import annotations

from typing import NamedTuple

from torch_lms.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Schedule

__all__ = ["InFlight", "Moment", "half_done", "moments_alone", "moments_of"]


class InFlight(NamedTuple):
    """Microbatches of a stage; see Note [Half done].

    Attributes:
        all: of which it holds anything.
        whole: of which it holds all that its forward left.
        keeping: of which it keeps gradients for the backward of weights.
    """

    all: int
    whole: int
    keeping: int

    def covers(self, other: InFlight) -> bool:
        """Whether there is at least as much of everything."""
        return self.all >= other.all and self.whole >= other.whole and self.keeping >= other.keeping


class Moment(NamedTuple):
    """What the stages of a device hold, which of them runs, and whether it runs a backward of inputs."""

    held: tuple[InFlight, ...]
    running: int
    inputs: bool

    def covers(self, other: Moment) -> bool:
        """Whether this one takes no less memory."""
        pairs = zip(self.held, other.held, strict=True)
        runs = self.running == other.running and self.inputs <= other.inputs
        return runs and all(one.covers(another) for one, another in pairs)


def half_done(schedule: Schedule, stage: int) -> int:
    """The most microbatches of a stage that are in the two parts of their backward at once."""
    return max(moment.held[0].keeping for moment in moments_alone(schedule, stage))


def moments_alone(schedule: Schedule, stage: int) -> tuple[Moment, ...]:
    """What one stage holds while its own actions run, less what another moment covers."""
    return moments_of(schedule, schedule.rank_of[stage], (stage,))


def moments_of(schedule: Schedule, rank: int, stages: tuple[int, ...]) -> tuple[Moment, ...]:
    """What the stages of a rank hold while each action runs, less what another one of the same stage covers."""
    return _worst(_along(schedule, rank, stages))


def _worst(moments: list[Moment]) -> tuple[Moment, ...]:
    seen = dict.fromkeys(moments)
    return tuple(one for one in seen if not any(other != one and other.covers(one) for other in seen))


def _along(schedule: Schedule, rank: int, stages: tuple[int, ...]) -> list[Moment]:
    held = dict.fromkeys(stages, InFlight(0, 0, 0))
    found = []
    for action in schedule.ranks[rank]:
        stage, kind = action.stage, action.kind
        if stage not in held:
            continue
        count, whole, keeping = held[stage]
        held[stage] = InFlight(count + (kind == FORWARD), whole + (kind == FORWARD), keeping + (kind == INPUT_BACKWARD))
        found.append(Moment(tuple(held.values()), stage, kind == INPUT_BACKWARD))
        count, whole, keeping = held[stage]
        held[stage] = InFlight(
            count - (kind in (BACKWARD, WEIGHT_BACKWARD)),
            whole - (kind in (BACKWARD, INPUT_BACKWARD)),
            keeping - (kind == WEIGHT_BACKWARD),
        )
    return found
