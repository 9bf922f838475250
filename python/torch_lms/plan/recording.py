"""What the core has recorded of a program, as a trace; and a plan, as the core carries it out."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from torch_lms.plan.document import Actions, Plan
from torch_lms.plan.trace import Cycle, Host, Link, Recipe, Trace, TraceOp, TraceStorage

__all__ = ["checked_recipe", "compile_plan", "host_of", "timed_again", "told_of", "trace_of"]

_LINK_SHARE = 0.95
_MUCH = 4.0  # times the usual time of the host
_AROUND = 3  # ops: some of them have no working space of their own


def trace_of(recording: Mapping[str, Any], *, limit_bytes: int, link: Link) -> Trace:
    """The trace of a recorded cycle.

    Args:
        recording: from ``core.take_recording``.
        limit_bytes: of the device when it was recorded.
        link: between the device and the host.
    """
    ops, storages = recording["ops"], recording["storages"]
    uses, writes = _places_of(ops, len(storages))
    durations_us = _durations_us(ops)
    made = [_storage(ops, durations_us, storage, uses[i], writes[i]) for i, storage in enumerate(storages)]
    made = [checked_recipe(storage, made) for storage in made]
    other_bytes = [
        max(0, max(op["allocated_bytes"] + op["paged_out_bytes"], op["peak_bytes"]) - live)
        for op, live in zip(ops, _live_bytes(made, len(ops)), strict=True)
    ]
    made = [_with_working_space(storage, other_bytes) for storage in made]
    first_forward = _first_forward(ops, storages)
    return Trace(
        device=recording["device"],
        signature=hashlib.sha256(repr([op["key"] for op in ops]).encode()).hexdigest()[:16],
        link=link,
        ops=tuple(
            TraceOp(
                name=op["name"],
                phase="backward" if op["backward"] else "forward" if place >= first_forward else "other",
                duration_us=durations_us[op["key"]],
                other_bytes=other_bytes[place],
                key=op["key"],
                inputs=tuple(op["inputs"]),
                outputs=tuple(op["outputs"]),
            )
            for place, op in enumerate(ops)
        ),
        storages=tuple(made),
        cycle=Cycle(kind="training" if any(op["backward"] for op in ops) else "inference"),
        limit_bytes=limit_bytes,
    )


def timed_again(trace: Trace, times_us: Sequence[float], host: Mapping[str, Any] | None = None) -> Trace:
    """The trace with other times of its ops, and so of recipes, and a link that has time to spare.

    A plan that needs all of the link's time waits whenever one copy is late. Times from a recording are a little short,
    which leaves some; those of a step that follows a plan are not.

    Args:
        trace: of the cycle.
        times_us: by place; 0 for ops that have not run.
        host: what the host has taken: ``host_us`` and ``caught_up`` by place, and ``pageout_us``, ``pagein_us`` and
            ``recompute_us``; None if it was not timed. Where it was not ahead of the device, an op's time is the
            host's, too, and none that the trace did not have before.
    """
    alike: dict[int, list[float]] = {}
    for place, (op, time_us) in enumerate(zip(trace.ops, times_us, strict=True)):
        if time_us > 0:
            own_us = min(time_us, op.duration_us) if host is not None and host["caught_up"][place] else time_us
            alike.setdefault(op.key, []).append(own_us)
    found_us = {key: median(values) for key, values in alike.items()}
    ops = tuple(replace(op, duration_us=found_us.get(op.key, op.duration_us)) for op in trace.ops)
    storages = tuple(
        storage
        if storage.recompute is None
        else replace(
            storage,
            recompute=replace(
                storage.recompute, duration_us=sum(ops[place].duration_us for place in storage.remade_by)
            ),
        )
        for storage in trace.storages
    )
    known = trace.host if host is None else host_of([op.key for op in ops], host)
    return replace(trace, ops=ops, storages=storages, link=trace.link.slower(1 / _LINK_SHARE), host=known)


def host_of(keys: Sequence[int], told: Mapping[str, Any]) -> Host:
    """What the host does, without what happens once: an op is counted with at most some times what others alike take.

    After some ops the host waits for the device: it was ahead when it began them, and a long time later it is not. Most
    of those alike do so, too: else the host was held up once.

    Args:
        keys: of the ops.
        told: see `timed_again`.
    """
    alike: dict[int, list[float]] = {}
    for key, time_us in zip(keys, told["host_us"], strict=True):
        alike.setdefault(key, []).append(time_us)
    usual_us = {key: median(values) for key, values in alike.items()}
    typical_us = median(told["host_us"]) if told["host_us"] else 0.0
    behind_next = [*told["caught_up"][1:], *told["caught_up"][:1]]
    may_wait = [
        place
        for place, time_us in enumerate(told["host_us"])
        if behind_next[place] and not told["caught_up"][place] and time_us > _MUCH * typical_us
    ]
    waiting = Counter(keys[place] for place in may_wait)
    waits = [place for place in may_wait if 2 * waiting[keys[place]] >= len(alike[keys[place]])]
    op_us, waits_at = [], set(waits)
    for place, (key, time_us) in enumerate(zip(keys, told["host_us"], strict=True)):
        if place in waits_at:
            op_us.append(min(time_us, typical_us))
        else:
            op_us.append(min(time_us, _MUCH * max(usual_us[key] if len(alike[key]) > 1 else typical_us, typical_us)))
    actions = {name: told[name] for name in ("pageout_us", "pagein_us", "recompute_us")}
    return Host(op_us=tuple(op_us), waits=tuple(waits), **actions)


def _places_of(ops: Sequence[Mapping[str, Any]], storages: int) -> tuple[list[list[int]], list[list[int]]]:
    uses: list[list[int]] = [[] for _ in range(storages)]
    writes: list[list[int]] = [[] for _ in range(storages)]
    for place, op in enumerate(ops):
        for number, written in zip(op["inputs"], op["written"], strict=True):
            for places in (uses[number], writes[number]) if written else (uses[number],):
                if not places or places[-1] != place:
                    places.append(place)
    return uses, writes


def _durations_us(ops: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """By op: the median of those alike, since some waited for what the host does while the cycle was recorded."""
    alike: dict[int, list[float]] = {}
    for op in ops:
        alike.setdefault(op["key"], []).append(op["duration_us"])
    return {key: median(durations_us) for key, durations_us in alike.items()}


def _storage(
    ops: Sequence[Mapping[str, Any]],
    durations_us: Mapping[int, float],
    storage: Mapping[str, Any],
    uses: list[int],
    writes: list[int],
) -> TraceStorage:
    producer = storage["producer"] if storage["producer"] >= 0 else None
    if producer is None and not storage["recurring"]:
        producer = uses[0]  # made where no op was seen to make it, before it was used first
    uses = [place for place in uses if producer is None or place > producer]
    released = storage["released"]
    writes = [place for place in writes if place in set(uses)]
    why_not = storage["why_not_recompute"]
    if writes != storage["rewrites"]:
        why_not = why_not or "an op writes to it that cannot be run again with the same result"
    if storage["raw_access"]:
        why_not = "its address was taken outside of ops"
    return TraceStorage(
        bytes=storage["bytes"],
        recurring=storage["recurring"],
        producer=producer,
        released=None if released < 0 else max(released, uses[-1] if uses else producer or 0),
        uses=tuple(uses),
        writes=tuple(writes),
        movable=storage["movable"],
        why_not_movable="" if storage["movable"] else "it is pinned",
        recompute=None
        if why_not or producer is None
        else Recipe(
            duration_us=sum(durations_us[ops[place]["key"]] for place in (producer, *storage["rewrites"])),
            inputs=tuple(dict.fromkeys(storage["ingredients"])),
            outside_bytes=storage["outside_bytes"],
            rewrites=tuple(storage["rewrites"]),
        ),
        why_not_recompute=why_not,
        module=storage["module"],
        line=storage["line"],
    )


def checked_recipe(storage: TraceStorage, storages: Sequence[TraceStorage]) -> TraceStorage:
    """Without its recipe if what it is made from is written before it is used last."""
    if storage.recompute is None or storage.producer is None:
        return storage
    first, last = storage.producer, storage.last_access or 0
    for number in storage.recompute.inputs:
        if any(first < place <= last for place in storages[number].writes):
            why_not = f"storage {number}, from which it is made, is written before it is used last"
            return replace(storage, recompute=None, why_not_recompute=why_not)
    return storage


def _with_working_space(storage: TraceStorage, other_bytes: Sequence[int]) -> TraceStorage:
    """With what the ops of its recipe have for themselves: by how much they exceed those before them, or after them."""
    if storage.recompute is None:
        return storage
    found = []
    for place in storage.remade_by:
        sides = other_bytes[max(0, place - _AROUND) : place], other_bytes[place + 1 : place + 1 + _AROUND]
        usual_bytes = max(min(side, default=0) for side in sides)
        found.append(max(0, other_bytes[place] - usual_bytes))
    return replace(storage, recompute=replace(storage.recompute, working_bytes=max(found)))


def _live_bytes(storages: Iterable[TraceStorage], places: int) -> list[int]:
    changes = [0] * (places + 1)
    for storage in storages:
        changes[storage.producer or 0] += storage.bytes
        changes[places if storage.released is None else storage.released + 1] -= storage.bytes
    live, total = [], 0
    for change in changes[:places]:
        total += change
        live.append(total)
    return live


def _first_forward(ops: Sequence[Mapping[str, Any]], storages: Sequence[Mapping[str, Any]]) -> int:
    """Where an optimizer's step, which comes first in a cycle, is over: nothing that recurs is written any more."""
    first = 0
    for place, op in enumerate(ops):
        if op["backward"]:
            break
        if any(
            written and storages[number]["recurring"]
            for number, written in zip(op["inputs"], op["written"], strict=True)
        ):
            first = place + 1
    return first


def compile_plan(plan: Plan) -> dict[str, Any]:
    """The plan as ``core.add_plan`` takes it, but for what it is called: each op with what follows it, packed."""
    actions = plan.actions()
    after = [actions.get(place, Actions()) for place in range(len(plan.ops))]
    moving = {one.storage for one in plan.decisions if one.out_after is not None}
    dropped = {number: place for place, one in enumerate(after) for number in one.drop}  # the last time
    again = [[number for number in one.drop if dropped[number] > place] for place, one in enumerate(after)]
    return {
        "device": plan.device,
        "limit_bytes": plan.limit_bytes,
        "keys": array("Q", [op.key for op in plan.ops]).tobytes(),
        "inputs": _packed(op.inputs for op in plan.ops),
        "outputs": _packed(op.outputs for op in plan.ops),
        # Also where it gives out what there was: it may have written to that.
        "remade": _packed(
            [number for number in op.outputs if dropped.get(number, -1) >= place] for place, op in enumerate(plan.ops)
        ),
        "drops": _packed(one.drop for one in after),
        "drops_again": _packed(again),
        "pageouts": _packed(one.pageout for one in after),
        "prefetches": _packed(one.prefetch for one in after),
        "binds": bytes(not moving.isdisjoint((*op.inputs, *op.outputs)) for op in plan.ops),
        "room": array("Q", plan.room_bytes()).tobytes(),
        "recurring": bytes(plan.recurring),
        "placeholders": [(one.bytes, one.since, one.until) for one in plan.placeholders],
    }


def _packed(lists: Iterable[Sequence[int]]) -> bytes:
    """Each list behind its length, in four bytes a number."""
    return array("i", [number for values in lists for number in (len(values), *values)]).tobytes()


def told_of(plan: Plan) -> dict[str, Any]:
    """The plan as a document, and what there is to know of it without reading that."""
    return {
        "document": plan.to_json().encode(),
        "signature": plan.signature,
        "device": plan.device,
    }
