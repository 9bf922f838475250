"""From a recorded step and the times of its ops to a trace that plans are made of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch_lms.fitting.recorder import RecordedOp, RecordedStorage
from torch_lms.fitting.step import RecordedStep
from torch_lms.plan.recording import checked_recipe
from torch_lms.plan.trace import Cycle, Link, Recipe, Trace, TraceOp, TraceStorage

__all__ = ["assemble_trace"]


def assemble_trace(
    step: RecordedStep, durations_us: Sequence[float], *, device: str, link: Link, min_bytes: int
) -> Trace:
    """The trace of a recorded step.

    Args:
        step: as it was recorded.
        durations_us: of its ops.
        device: on which it runs.
        link: between the device and the host.
        min_bytes: smaller storages do not leave.
    """
    numbers = {storage: number for number, storage in enumerate(step.storages)}
    modules = _modules(step)
    storages = [_storage(storage, step, durations_us, numbers, modules, min_bytes) for storage in step.storages]
    ops = tuple(
        TraceOp(name=op.name, phase=op.phase, duration_us=duration_us, other_bytes=op.other_bytes)
        for op, duration_us in zip(step.ops, durations_us, strict=True)
    )
    said = [(op.name, [numbers[one] for one in op.inputs], [one.bytes for one in op.outputs]) for op in step.ops]
    return Trace(
        device=device,
        signature=hashlib.sha256(repr(said).encode()).hexdigest()[:16],
        link=link,
        ops=ops,
        storages=tuple(checked_recipe(storage, storages) for storage in storages),
        cycle=Cycle(kind="training" if any(op.phase == "backward" for op in step.ops) else "inference"),
    )


def _modules(step: RecordedStep) -> dict[int, str]:
    """The path of the module that runs, or has run, at each place of a node."""
    paths = {node.name: node.module for node in step.nodes}
    return {place: paths[span.node] for span in step.spans for place in range(span.start, span.end)}


def _storage(
    storage: RecordedStorage,
    step: RecordedStep,
    durations_us: Sequence[float],
    numbers: Mapping[RecordedStorage, int],
    modules: Mapping[int, str],
    min_bytes: int,
) -> TraceStorage:
    place, recipe, why_not = storage.producer, None, "no op of the step made it"
    if place is not None:
        made_from, why_not = step.ops[place].makes_again_from(storage)
        if not all(_is_run_again(step.ops[one], storage) for one in storage.writes):
            why_not = why_not or "an op writes to it that cannot be run again with the same result"
        if not why_not:
            read = (given for one in storage.writes for given in step.ops[one].inputs if given is not storage)
            run = (place, *storage.writes)
            recipe = Recipe(
                duration_us=sum(durations_us[one] for one in run),
                inputs=tuple(dict.fromkeys(numbers[one] for one in (*made_from, *read))),
                rewrites=tuple(storage.writes),
                working_bytes=max(step.ops[one].other_bytes for one in run),
            )
    movable = storage.bytes >= min_bytes
    return TraceStorage(
        bytes=storage.bytes,
        recurring=storage.lasting,
        producer=place,
        released=storage.released,
        uses=tuple(storage.uses),
        writes=tuple(storage.writes),
        movable=movable,
        why_not_movable="" if movable else f"it is smaller than {min_bytes} bytes",
        recompute=recipe,
        why_not_recompute=why_not,
        module="" if place is None else modules.get(place, ""),
    )


def _is_run_again(op: RecordedOp, storage: RecordedStorage) -> bool:
    return op.rewrites is storage and not op.why_not_again
