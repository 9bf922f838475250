"""A pipeline run action by action on a clock: what a step takes if transfers are free."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["run_pipeline"]


def _actions(stage: int, stages: int, microbatches: int, schedule: str) -> list[tuple[str, int]]:
    """The order in which a stage works: GPipe turns once, 1F1B alternates after a warm-up."""
    first = microbatches if schedule == "gpipe" else min(stages - stage, microbatches)
    order = [("F", index) for index in range(first)]
    for index in range(microbatches):
        order.append(("B", index))
        if first + index < microbatches:
            order.append(("F", first + index))
    return order


def run_pipeline(forward: Sequence[float], backward: Sequence[float], microbatches: int, schedule: str) -> float:
    """The time when the last action ends."""
    stages = len(forward)
    queues = [_actions(stage, stages, microbatches, schedule) for stage in range(stages)]
    ended: dict[tuple[str, int, int], float] = {}
    clock = [0.0] * stages
    while any(queues):
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            kind, index = queue[0]
            before = ("F", stage - 1, index) if kind == "F" else ("B", stage + 1, index)
            ready = (
                0.0 if kind == "F" and stage == 0 else ended.get(("F", stage, index) if before[1] == stages else before)
            )
            if ready is None:
                continue
            queue.pop(0)
            clock[stage] = max(clock[stage], ready) + (forward if kind == "F" else backward)[stage]
            ended[kind, stage, index] = clock[stage]
    return max(clock)
