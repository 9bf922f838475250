"""One cycle of a program as a document: its ops, its storages, and the link between device and host.

A place is the number of an outermost op within the cycle. A trace is data only. It is checked where it is made, so that
whoever is given one can rely on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, ClassVar

from torch_lms.errors import PlanError
from torch_lms.plan.fields import Document, Range, Since, ascending

__all__ = ["Cycle", "Host", "Link", "Recipe", "Trace", "TraceOp", "TraceStorage", "check_ops", "check_storages"]

PHASES = ("forward", "backward", "other")
CYCLE_KINDS = ("training", "evaluation", "inference")
_SLOWER = 1.5  # times what the host took


@dataclass(frozen=True, kw_only=True)
class Link:
    """The way between device and host: a copy takes its latency, then its bytes at the direction's rate.

    Attributes:
        out_bytes_per_us: from the device.
        in_bytes_per_us: to the device.
        latency_us: of each copy.
        share_beside: of its rate, that either direction has while the other one copies, too.
    """

    out_bytes_per_us: Annotated[float, Range(above=0.0)]
    in_bytes_per_us: Annotated[float, Range(above=0.0)]
    latency_us: float = 0.0
    share_beside: Annotated[float, Range(above=0.0, most=1.0), Since(4)] = 1.0

    def __post_init__(self) -> None:
        if self.out_bytes_per_us <= 0 or self.in_bytes_per_us <= 0 or self.latency_us < 0:
            raise PlanError(f"expected rates above 0 and a latency of at least 0, found {self}; measure the link again")
        if not 0 < self.share_beside <= 1:
            raise PlanError(f"expected a share_beside above 0 and up to 1, found {self}; measure the link again")

    def out_us(self, size_bytes: float) -> float:
        """How long a copy from the device takes."""
        return self.latency_us + size_bytes / self.out_bytes_per_us

    def in_us(self, size_bytes: float) -> float:
        """How long a copy to the device takes."""
        return self.latency_us + size_bytes / self.in_bytes_per_us

    def slower(self, times: float) -> Link:
        """One on which each copy takes so many times as long."""
        return replace(
            self,
            out_bytes_per_us=self.out_bytes_per_us / times,
            in_bytes_per_us=self.in_bytes_per_us / times,
            latency_us=times * self.latency_us,
        )


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the host does for a cycle: it submits each op, and starts what a plan asks for.

    Attributes:
        op_us: by place, from when the op begins to when the next one does, without what it waits for and without what a
            plan asks for; empty if it is not known.
        waits: places of ops after which the host waits until the device has done all that it was given.
        pageout_us: it takes to start a copy out.
        pagein_us: the same of a copy in.
        recompute_us: it takes to run an op again.
    """

    op_us: tuple[float, ...] = ()
    waits: tuple[int, ...] = ()
    pageout_us: float = 0.0
    pagein_us: float = 0.0
    recompute_us: float = 0.0

    def slower(self, times: float) -> Host:
        """One that takes so many times as long for everything."""
        return Host(
            op_us=tuple(times * one for one in self.op_us),
            waits=self.waits,
            pageout_us=times * self.pageout_us,
            pagein_us=times * self.pagein_us,
            recompute_us=times * self.recompute_us,
        )


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """What the recorded cycle is.

    Attributes:
        kind: training, evaluation or inference.
        forwards: in one cycle; more than one where gradients are accumulated.
    """

    kind: Annotated[str, CYCLE_KINDS] = "training"
    forwards: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceOp:
    """One outermost op.

    Attributes:
        name: such as ``aten::addmm``.
        phase: forward, backward or other.
        duration_us: on the compute stream.
        other_bytes: in use during the op that belong to none of the storages: small tensors, working space.
        key: by which the core knows it again: of its name and its storages' sizes, 64 bits.
        inputs: storages that it is given, in its order.
        outputs: storages that it gives, in its order.
    """

    name: str
    phase: Annotated[str, PHASES]
    duration_us: float
    other_bytes: int = 0
    key: Annotated[int, Range(most=2**64 - 1)] = 0
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


def check_storages(ids: Iterable[int], count: int, where: str) -> None:
    """Checks that ids are those of storages.

    Args:
        ids: to be checked.
        count: of all storages.
        where: the ids are in their document.

    Raises:
        PlanError: naming the first that is not.
    """
    for one in ids:
        if not 0 <= one < count:
            raise PlanError(f"expected storages from 0 to {count - 1} at {where}, found {one}")


def check_ops(ops: Sequence[TraceOp], storages: int) -> None:
    """Checks what ops are given and give: ids of so many storages."""
    for place, op in enumerate(ops):
        check_storages(op.inputs, storages, f"ops[{place}].inputs")
        check_storages(op.outputs, storages, f"ops[{place}].outputs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a storage is made again.

    Attributes:
        duration_us: of its ops.
        inputs: storages that they read.
        outside_bytes: of inputs that are no storages of the trace and that the recipe keeps alive.
        rewrites: places of the ops that write the storage in place, which are run again after its producer, in order.
        working_bytes: that its ops have for themselves while they run, the most of one of them.
    """

    duration_us: float
    inputs: tuple[int, ...] = ()
    outside_bytes: int = 0
    rewrites: tuple[int, ...] = ()
    working_bytes: Annotated[int, Since(3)] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceStorage:
    """One storage.

    Attributes:
        bytes: on the device.
        recurring: whether it lives across cycles.
        producer: place of the op that made it; None for one that exists at the start.
        released: the last place at which somebody holds it; None if it lives to the end.
        uses: places that read or write it, after the producer, ascending.
        writes: those of them that write it.
        movable: whether it can leave the device at all.
        why_not_movable: in words.
        recompute: how it can be made again; None if it cannot.
        why_not_recompute: in words.
        module: path of the module whose op made it.
        line: of the user's code.
    """

    bytes: int
    recurring: bool = False
    producer: int | None = None
    released: int | None = None
    uses: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    movable: bool = True
    why_not_movable: str = ""
    recompute: Recipe | None = None
    why_not_recompute: str = ""
    module: str = ""
    line: str = ""

    def __post_init__(self) -> None:
        if not ascending(self.uses) or not ascending(self.writes):
            raise PlanError(f"expected uses and writes in ascending order, found {self.uses} and {self.writes}")
        if not set(self.writes) <= set(self.uses):
            raise PlanError(f"expected writes among the uses {self.uses}, found {self.writes}; add them to uses")
        if self.producer is not None and self.uses and self.uses[0] <= self.producer:
            raise PlanError(f"expected uses after the producer {self.producer}, found {self.uses[0]}")
        if self.released is not None and self.last_access is not None and self.released < self.last_access:
            raise PlanError(
                f"expected no use after released, {self.released}, found one at {self.last_access}; release it later"
            )
        if self.recompute is not None and self.producer is None:
            raise PlanError("expected no recompute of a storage without a producer, found one; set it to null")
        rewrites = () if self.recompute is None else self.recompute.rewrites
        if rewrites != self.writes[: len(rewrites)]:
            raise PlanError(f"expected the first of the writes {self.writes} as recompute.rewrites, found {rewrites}")

    @property
    def last_access(self) -> int | None:
        """The last place that makes, reads or writes it."""
        return self.uses[-1] if self.uses else self.producer

    @property
    def remade_by(self) -> tuple[int, ...]:
        """Places of the ops that its recipe runs; without a recipe, of its producer, if it has one."""
        if self.producer is None:
            return ()
        return self.producer, *(() if self.recompute is None else self.recompute.rewrites)

    @property
    def settled(self) -> int | None:
        """The place from which on its recipe makes it: of the last op that the recipe runs, else its producer."""
        return max(self.remade_by, default=None)

    @property
    def lasting(self) -> bool:
        """Whether the same bytes go from one cycle into the next."""
        return self.recurring and self.producer is None and self.released is None


@dataclass(frozen=True)
class PlaceIndex:
    """What happens at each place: storages made, used, written there, and released after it."""

    made: Sequence[Sequence[int]]
    used: Sequence[Sequence[int]]
    written: Sequence[Sequence[int]]
    released: Sequence[Sequence[int]]


@dataclass(frozen=True)
class StorageIndex:
    """Figures of all storages, those that last, and what is there, and how much, when a cycle begins besides them."""

    bytes: Sequence[int]
    recipes: Sequence[Recipe | None]
    lasting: Sequence[int]
    present: Sequence[bool]
    present_bytes: int


@dataclass(frozen=True, kw_only=True)
class Trace(Document):
    """One recorded cycle.

    Attributes:
        device: on which it ran.
        signature: of the cycle, hexadecimal; programs that do the same have the same.
        link: between device and host.
        ops: by place.
        storages: by id.
        cycle: what the cycle is.
        limit_bytes: of the device's memory when it was recorded; None without.
        host: what it does for the cycle.
    """

    FORMAT: ClassVar[str] = "torch_lms.trace"
    VERSION: ClassVar[int] = 4
    OLDEST: ClassVar[int] = 1

    device: str
    signature: str
    link: Link
    ops: tuple[TraceOp, ...]
    storages: tuple[TraceStorage, ...]
    cycle: Cycle = field(default_factory=Cycle)
    limit_bytes: int | None = None
    host: Annotated[Host, Since(2)] = field(default_factory=Host)

    def __post_init__(self) -> None:
        if not self.ops:
            raise PlanError("expected at least one op in a trace, found none; record a cycle that runs ops")
        self._check_host()
        check_ops(self.ops, len(self.storages))
        for number, storage in enumerate(self.storages):
            self._check_places(number, storage)
            self._check_recipe(number, storage)

    @cached_property
    def by_place(self) -> PlaceIndex:
        """The storages' events, by place."""
        made: list[list[int]] = [[] for _ in self.ops]
        used: list[list[int]] = [[] for _ in self.ops]
        written: list[list[int]] = [[] for _ in self.ops]
        released: list[list[int]] = [[] for _ in self.ops]
        for number, storage in enumerate(self.storages):
            if storage.producer is not None:
                made[storage.producer].append(number)
            for place in storage.uses:
                used[place].append(number)
            for place in storage.writes:
                written[place].append(number)
            if storage.released is not None:
                released[storage.released].append(number)
        return PlaceIndex(made=made, used=used, written=written, released=released)

    @cached_property
    def by_storage(self) -> StorageIndex:
        """What a simulation asks of each storage."""
        present = [one.producer is None and not one.lasting for one in self.storages]
        return StorageIndex(
            bytes=[one.bytes for one in self.storages],
            recipes=[one.recompute for one in self.storages],
            lasting=[number for number, one in enumerate(self.storages) if one.lasting],
            present=present,
            present_bytes=sum(one.bytes for one, here in zip(self.storages, present, strict=True) if here),
        )

    @cached_property
    def handed_on(self) -> frozenset[int]:
        """Storages that the next cycle uses as others: gradients, where the optimizer comes first in a cycle.

        Nothing but their sizes tells them from those that the next cycle only releases.
        """
        used = {one.bytes for one in self.storages if one.recurring and one.released is not None and one.uses}
        made = (number for number, one in enumerate(self.storages) if one.producer is not None and one.released is None)
        return frozenset(number for number in made if self.storages[number].bytes in used)

    @cached_property
    def on_slower_host(self) -> Trace:
        """The same where the host is slower, see Note [A host's speed] in `predict`."""
        return replace(self, host=self.host.slower(_SLOWER))

    @property
    def plain_us(self) -> float:
        """The ops' durations together."""
        return sum(op.duration_us for op in self.ops)

    def op_of(self, storage: int) -> str:
        """The name of the op that made a storage; empty for one that exists at the start."""
        producer = self.storages[storage].producer
        return "" if producer is None else self.ops[producer].name

    def _check_host(self) -> None:
        count = len(self.ops)
        if len(self.host.op_us) not in (0, count):
            raise PlanError(f"expected host.op_us for {count} ops or for none, found {len(self.host.op_us)}")
        if not ascending(self.host.waits) or any(not 0 <= place < count for place in self.host.waits):
            raise PlanError(f"expected ascending places from 0 to {count - 1} at host.waits, found {self.host.waits}")

    def _check_places(self, number: int, storage: TraceStorage) -> None:
        last = len(self.ops) - 1
        for name, value in (("producer", storage.producer), ("released", storage.released)):
            if value is not None and not 0 <= value <= last:
                raise PlanError(f"expected a place from 0 to {last} at storages[{number}].{name}, found {value}")
        if storage.uses and not (storage.uses[0] >= 0 and storage.uses[-1] <= last):
            raise PlanError(f"expected places from 0 to {last} at storages[{number}].uses, found {storage.uses}")

    def _check_recipe(self, number: int, storage: TraceStorage) -> None:
        if storage.recompute is None:
            return
        assert storage.producer is not None
        assert storage.settled is not None
        where = f"storages[{number}].recompute.inputs"
        check_storages(storage.recompute.inputs, len(self.storages), where)
        for given in storage.recompute.inputs:
            source = self.storages[given]
            # The same op may have made it, as dropout its mask, if it stays as it is.
            last = storage.settled if source.recompute is None and given != number else storage.settled - 1
            if source.producer is not None and (source.producer > last or given == number):
                raise PlanError(f"expected storages made before place {storage.settled} at {where}, found {given}")
            if source.released is not None and source.released < storage.producer:
                raise PlanError(f"expected storages held at place {storage.producer} at {where}, found {given}")
