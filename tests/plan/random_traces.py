"""Small random traces, and all that could be decided for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

from hypothesis import strategies as st

from torch_lms.plan import DROP_UNCHANGED, KEEP, RECOMPUTE, SWAP, Decision, Link, Recipe, Trace, TraceOp, TraceStorage
from torch_lms.plan.problem import Problem


def random_trace(seed: int, *, most_ops: int = 8, most_storages: int = 4) -> Trace:
    """A trace with recipes, writes, releases and storages that last."""
    random = Random(seed)
    count = random.randint(3, most_ops)
    ops = tuple(
        TraceOp(
            name=f"op{place}",
            phase="forward" if place < count // 2 else "backward",
            duration_us=float(random.randint(0, 60)),
            other_bytes=random.randint(0, 5),
        )
        for place in range(count)
    )
    storages: list[TraceStorage] = []
    for _ in range(random.randint(1, most_storages)):
        storages.append(_storage(random, count, storages))
    link = Link(
        out_bytes_per_us=float(random.randint(1, 6)),
        in_bytes_per_us=float(random.randint(1, 6)),
        latency_us=float(random.randint(0, 2)),
        share_beside=random.choice([1.0, 0.9, 0.5]),
    )
    return Trace(device="cuda:0", signature="c0ffee", link=link, ops=ops, storages=tuple(storages))


def _storage(random: Random, count: int, earlier: list[TraceStorage]) -> TraceStorage:
    producer = random.choice([None, *range(count - 1), *range(count - 1)])
    places = range(0 if producer is None else producer + 1, count)
    uses = sorted(random.sample(places, k=min(len(places), random.randint(0, 3))))
    writes = [place for place in uses if random.random() < 0.1]
    last = uses[-1] if uses else producer or 0
    released = None
    if producer is not None and random.random() < 0.7:
        released = random.choice([last, random.randint(last, count - 1)])
    recipe = None
    if producer is not None and random.random() < 0.7:
        settled = writes[-1] if writes else producer
        inputs = [number for number, one in enumerate(earlier) if _held(one, settled) and random.random() < 0.6]
        recipe = Recipe(
            duration_us=float(random.randint(0, 30)),
            inputs=tuple(inputs),
            rewrites=tuple(writes),
            working_bytes=random.choice([0, 0, 40]),
        )
    return TraceStorage(
        bytes=random.randint(1, 100),
        recurring=producer is None or random.random() < 0.1,
        producer=producer,
        released=released,
        uses=tuple(uses),
        writes=tuple(writes),
        movable=random.random() < 0.95,
        recompute=recipe,
    )


def chained_trace(seed: int) -> Trace:
    """A forward pass of ops that read what the last ones made, and a backward pass that reads it again in reverse.

    What is not read again is released at its last use, so that recipes have spent inputs and chains of them.
    """
    random = Random(seed)
    forward = random.randint(3, 6)
    count = 2 * forward
    ops = tuple(
        TraceOp(
            name=f"op{place}",
            phase="forward" if place < forward else "backward",
            duration_us=float(random.randint(0, 60)),
            other_bytes=random.choice([0, 0, 5, 20]),
        )
        for place in range(count)
    )
    inputs: list[list[int]] = []
    uses: list[set[int]] = []
    for place in range(forward):
        given = [one for one in range(place) if random.random() < (0.8 if one >= place - 2 else 0.25)]
        for one in given:
            uses[one].add(place)
        later = range(place + 1, forward)
        mine = set(random.sample(later, k=min(len(later), random.choice([0, 1, 2]))))
        inputs.append(given)
        uses.append(mine | ({count - 1 - place} if random.random() < 0.6 else set()))
    storages = tuple(
        TraceStorage(
            bytes=random.choice([10, 20, 30, 50, 100]),
            recurring=False,
            producer=place,
            released=max(uses[place], default=place),
            uses=tuple(sorted(uses[place])),
            writes=(),
            movable=True,
            recompute=Recipe(
                duration_us=float(random.choice([0, 1, 5, 30])),
                inputs=tuple(inputs[place]),
                working_bytes=random.choice([0, 0, 20]),
            ),
        )
        for place in range(forward)
    )
    rate = random.choice([1.0, 0.05])
    link = Link(out_bytes_per_us=rate, in_bytes_per_us=rate, latency_us=0.0)
    return Trace(device="cuda:0", signature="c0ffee", link=link, ops=ops, storages=storages)


def chained_traces() -> st.SearchStrategy[Trace]:
    """Chained traces, by seed."""
    return st.integers(0, 2**32).map(chained_trace)


def _held(storage: TraceStorage, place: int) -> bool:
    made = storage.producer is None or storage.producer < place
    return made and (storage.released is None or storage.released >= place)


def traces(*, most_ops: int = 8, most_storages: int = 4) -> st.SearchStrategy[Trace]:
    """Random traces, by seed."""
    seeds = st.integers(0, 2**32)
    return seeds.map(lambda seed: random_trace(seed, most_ops=most_ops, most_storages=most_storages))


def all_decisions(problem: Problem) -> Iterator[list[Decision]]:
    """Everything that choices for the problem's candidates can come to, with every place for every copy in."""
    places = len(problem.trace.ops)
    options: list[list[tuple[str, int | None]]] = []
    for one in problem.candidates:
        mine: list[tuple[str, int | None]] = [(KEEP, None)]
        if one.replay is not None:
            mine.append((RECOMPUTE, None))
        if one.swappable:
            kind = DROP_UNCHANGED if one.unchanged else SWAP
            mine.append((kind, None))
            if one.back_at is not None:
                mine += [(kind, place % places) for place in range(one.out_after + 1, one.back_at - 1)]
        options.append(mine)
    for chosen in product(*options):
        choices = {number: kind for number, (kind, _) in enumerate(chosen) if kind != KEEP}
        in_after = {number: place for number, (_, place) in enumerate(chosen) if place is not None}
        yield problem.decisions(choices, in_after)
