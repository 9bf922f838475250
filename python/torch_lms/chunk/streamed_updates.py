"""Updates, on the device, of chunks whose masters are on the host.

Note [Streamed updates]
Portions of masters and of the optimizer's state come to the device, are updated there, and go back: 12 bytes for each
parameter in, and as many out, at the same time. Three streams carry that, beside the one that computes. Some buffers
take turns; what the last step has updated next is brought ahead of its gradients. The caller never waits, nor does the
stream that computes, until it uses the parameters that have been made. There are buffers only while there are updates:
one after the other is taken as a backward gives back what its forward has kept.

The device computes what it would compute of masters that it holds, so that losses are the same bit for bit. An
optimizer that treats each element alone gets pieces of tensors, all others whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from torch_lms._core import core
from torch_lms.chunk.layout import ALIGNMENT
from torch_lms.chunk.masters import Masters, Part
from torch_lms.chunk.model_data import ModelData
from torch_lms.chunk.portions import Portion, Span, groups_of, portions_of
from torch_lms.chunk.updates import Updates

__all__ = ["StreamedUpdates"]

_PORTION_NUMEL = (1 << 24) + (1 << 18)  # 64 MiB of each list, for the link's full rate; a matrix with its bias
_FIRST_BUFFERS, _MOST_BUFFERS = 2, 6
_BUFFERS_SHARE = 0.125  # of the device, for all of them
_BYTES_EACH = 12  # of a parameter: its master and two states, as most optimizers have

_Place: TypeAlias = tuple[int, int]  # a chunk, and which of its portions
_Key: TypeAlias = tuple[str, torch.dtype]
_MASTERS: _Key = ("", torch.float32)


@dataclass(eq=False)
class _Buffer:
    """Room for one portion of all lists.

    Attributes:
        lists: by key; as many elements each as the largest portion has.
        sources: where what is in them has come from.
        place: of the portion that is in it.
        came: when that has come.
        free: when what was in it last has gone.
    """

    lists: dict[_Key, torch.Tensor] = field(default_factory=dict)
    sources: dict[_Key, torch.Tensor] = field(default_factory=dict)
    place: _Place | None = None
    came: torch.cuda.Event | None = None
    free: torch.cuda.Event | None = None


class StreamedUpdates(Updates):
    """Brings masters to the device, updates them there, and puts them back.

    Not thread-safe: one caller at a time, on whatever thread.

    Args:
        data: of the model.
        masters: to update.
        cut: whether the optimizer may get pieces of tensors.
        device_bytes: that the program may use on the device.
        ended: called by `wait` with tensors whose parameters are made.
    """

    def __init__(
        self,
        data: ModelData,
        masters: Masters,
        *,
        cut: bool,
        device_bytes: int,
        ended: Callable[[Sequence[int]], None],
    ) -> None:
        super().__init__(data)
        self._masters = masters
        self._ended = ended
        most_numel = min(_PORTION_NUMEL, int(_BUFFERS_SHARE * device_bytes / (_MOST_BUFFERS * _BYTES_EACH)))
        most_numel = max(ALIGNMENT, most_numel // ALIGNMENT * ALIGNMENT)
        self._cap = _MOST_BUFFERS
        self._portions = [portions_of(data.extents(chunk), most_numel, cut=cut) for chunk in range(data.layout.chunks)]
        self._numel = max((one.numel for of_chunk in self._portions for one in of_chunk), default=0)
        on_cuda = data.device.type == "cuda"
        self._in, self._compute, self._out = (torch.cuda.Stream(data.device) if on_cuda else None for _ in range(3))
        self._callers_stream: torch.cuda.Stream | None = None
        self._buffers: list[_Buffer] = []  # that which has been used last is the last
        self._order: list[_Place] = []  # of the last step's updates
        self._at: dict[_Place, int] = {}  # in that order
        self._made: dict[_Place, None] = {}  # this step's, in their order
        self._updated: list[int] = []  # since the last `wait`
        self._half: set[tuple[_Place, Span]] = set()  # what has been updated of tensors that have not been as a whole
        self._gone: dict[_Place, torch.cuda.Event] = {}  # when what was updated last is on the host
        data.settle_masters = self.settle_masters

    def groups(self, chunk: int) -> list[list[int]]:
        """Those of each portion."""
        return groups_of(self._portions[chunk])

    @torch.no_grad()
    def start(self, numbers: Sequence[int], gradients: Sequence[torch.Tensor], scale: float | None = None) -> None:
        """Updates tensors of one chunk, and brings what comes next."""
        chunk = self._data.chunk_of(numbers[0])
        flat = {number: self._flat(number, one) for number, one in zip(numbers, gradients, strict=True)}
        if self._in is not None:
            self._callers_stream = torch.cuda.current_stream(self._data.device)
        self._follow(self._compute, kept=[one for number, one in flat.items() if not self._is_in_place(number, one)])
        try:
            for which, portion in enumerate(self._portions[chunk]):
                place = (chunk, which)
                spans = [span for span in portion.spans if span.number in flat and (place, span) not in self._half]
                if spans:
                    self._update(place, portion, spans, flat, scale)
                    self._half.update((place, span) for span in spans)
        finally:
            self._note_updated(chunk, numbers)

    def _note_updated(self, chunk: int, numbers: Sequence[int]) -> None:
        """An update that has failed may be tried again: what has been updated is not, then."""
        missing = {
            span.number
            for which, portion in enumerate(self._portions[chunk])
            for span in portion.spans
            if ((chunk, which), span) not in self._half
        }
        done = [number for number in numbers if number not in missing]
        self._half = {one for one in self._half if one[1].number not in done}
        self._updated += done
        if len(done) < len(numbers):
            self.wait()  # before anybody looks at what has been made

    def abandon(self) -> None:
        """What has been updated in part is to be updated anew."""
        self._half.clear()
        self._masters.parts_ended()

    def wait(self) -> None:
        """Until all parameters are made: the current stream waits, not the caller."""
        if not self._updated:
            return
        if self._compute is not None:
            torch.cuda.current_stream(self._data.device).wait_stream(self._compute)
        self._ended(self._updated)  # an interrupt of this alone: it is done another time
        self._updated = []

    def step_ended(self) -> None:
        """The next update is the first of a step."""
        self.abandon()
        self._order, self._made = list(self._made), {}
        self._at = {place: at for at, place in enumerate(self._order)}
        self._free_buffers()

    def settle_masters(self) -> None:
        """Until all masters and states are on the host, and no copies of them are on the device."""
        for stream in (self._in, self._out):
            if stream is not None:
                stream.synchronize()
        self._free_buffers()
        self._gone.clear()

    def _update(
        self,
        place: _Place,
        portion: Portion,
        spans: Sequence[Span],
        gradients: dict[int, torch.Tensor],
        scale: float | None,
    ) -> None:
        buffer = self._bring(place)
        buffer.place = None  # nobody else is to find it
        self._made[place] = None
        with _on(self._compute):
            if buffer.came is not None and self._compute is not None:
                self._compute.wait_event(buffer.came)
            with self._timed("update", self._compute, beside=self._compute is not None):
                parts = [self._part(buffer, span, gradients[span.number], scale) for span in spans]
                new = self._masters.step_parts(parts)
                self._make_parameters(place[0], portion, spans, buffer)
        self._follow(self._out, of=self._compute)
        with _on(self._out):
            with self._timed("masters out", self._out, beside=self._out is not None):
                for key, there in buffer.sources.items():
                    there.copy_(buffer.lists[key][: portion.numel], non_blocking=True)
                for span, values in zip(spans, new, strict=True):
                    self._put_new(span, values)
            if self._out is not None:
                buffer.free = self._gone[place] = self._out.record_event()
        self._bring_next(place)

    def _part(self, buffer: _Buffer, span: Span, gradient: torch.Tensor, scale: float | None) -> Part:
        known = self._masters.known(span.number, whole=span.whole)
        wide = gradient[span.begin : span.begin + span.numel].float()
        if scale is not None:
            wide.div_(scale)
        return Part(
            number=span.number,
            master=self._shaped(buffer.lists[_MASTERS], span, span.offset),
            gradient=self._shaped(wide, span, 0),
            state={
                key: self._shaped(buffer.lists[key, value.dtype], span, span.offset) for key, value in known.items()
            },
            whole=span.whole,
        )

    def _shaped(self, flat: torch.Tensor, span: Span, offset: int) -> torch.Tensor:
        """A span in its tensor's shape, if it is all of a tensor."""
        if span.whole:
            like = self._data.tensor_to_update(span.number)
            return flat.as_strided(like.shape, like.stride(), offset)
        return flat[offset : offset + span.numel]

    def _flat(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient's elements in the order in which its parameter's lie."""
        like = self._data.tensor_to_update(number)
        if gradient.stride() != like.stride():
            gradient = torch.empty_like(like, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
        return gradient.as_strided((gradient.numel(),), (1,))

    def _is_in_place(self, number: int, gradient: torch.Tensor) -> bool:
        parameters = self._data.parameters.chunk(self._data.chunk_of(number))
        return bool(gradient.untyped_storage()._cdata == parameters.untyped_storage()._cdata)

    def _make_parameters(self, chunk: int, portion: Portion, spans: Sequence[Span], buffer: _Buffer) -> None:
        """As one copy, where the whole portion has been updated."""
        there = self._data.parameters.chunk(chunk)[portion.begin : portion.begin + portion.numel]
        if len(spans) == len(portion.spans):
            there.copy_(buffer.lists[_MASTERS][: portion.numel])
            return
        for span in spans:
            place = slice(span.offset, span.offset + span.numel)
            there[place].copy_(buffer.lists[_MASTERS][place])

    # --- copies ---

    def _bring(self, place: _Place) -> _Buffer:
        """The buffer that a portion is in, or will be."""
        for buffer in self._buffers:
            if buffer.place == place:
                return buffer
        new = self._new_buffer(place) if len(self._buffers) < self._most_buffers else None
        if new is not None:
            buffer = new
        else:  # the one that has been free for longest, or else what has been brought first, in vain
            buffer = min(self._buffers, key=lambda one: one.place is not None)
            self._buffers.remove(buffer)
        self._buffers.append(buffer)
        self._load(buffer, place)
        return buffer

    @property
    def _most_buffers(self) -> int:
        return min(self._cap, _FIRST_BUFFERS + len(self._made))

    def _new_buffer(self, place: _Place) -> _Buffer | None:
        """None where the device has no room for it, and there are others."""
        buffer = _Buffer()
        try:
            for key in self._lists(place):
                buffer.lists[key] = self._room(key)
        except torch.OutOfMemoryError:
            if not self._buffers:
                raise
            self._cap = len(self._buffers)
            return None
        return buffer

    def _free_buffers(self) -> None:
        for room in (room for buffer in self._buffers for room in buffer.lists.values()):
            for stream in (self._in, self._compute, self._out):
                if stream is not None:
                    room.record_stream(stream)
        self._buffers.clear()

    def _load(self, buffer: _Buffer, place: _Place) -> None:
        with _on(self._in):
            if buffer.free is not None and self._in is not None:
                self._in.wait_event(buffer.free)
            if place in self._gone and self._in is not None:
                self._in.wait_event(self._gone[place])
            buffer.sources = self._lists(place)
            for key in buffer.sources.keys() - buffer.lists.keys():
                buffer.lists[key] = self._room(key)
            with self._timed("masters in", self._in, beside=self._in is not None):
                for key, there in buffer.sources.items():
                    buffer.lists[key][: there.numel()].copy_(there, non_blocking=True)
            buffer.place = place
            buffer.came = None if self._in is None else self._in.record_event()

    def _room(self, key: _Key) -> torch.Tensor:
        """It stays on the device. Of the stream that computes: its memory is shared with all else."""
        with torch.inference_mode(False), _on(self._callers_stream):
            room = torch.empty(self._numel, dtype=key[1], device=self._data.device)
        self._follow(self._in, of=self._callers_stream)
        core.pin(room)
        return room

    def _lists(self, place: _Place) -> dict[_Key, torch.Tensor]:
        """A portion of all lists, on the host."""
        chunk, which = place
        portion = self._portions[chunk][which]
        lists = {_MASTERS: self._data.masters_of(chunk), **self._data.kept(chunk)}
        return {key: one[portion.begin : portion.begin + portion.numel] for key, one in lists.items()}

    def _bring_next(self, place: _Place) -> None:
        """What the last step has updated after this, as far as there is room."""
        at = self._at.get(place, len(self._order))
        for follower in self._order[at + 1 : at + self._most_buffers]:
            if follower not in self._made:
                self._bring(follower)

    def _put_new(self, span: Span, values: Mapping[str, torch.Tensor]) -> None:
        """What the optimizer has begun to keep."""
        for key, value in values.items():
            there = self._masters.view_of_new(span.number, key, value.dtype)
            if not span.whole:
                there = there.as_strided((span.numel,), (1,), there.storage_offset() + span.begin)
            there.copy_(value, non_blocking=True)
            if self._out is not None:
                value.record_stream(self._out)

    def _follow(
        self,
        stream: torch.cuda.Stream | None,
        *,
        of: torch.cuda.Stream | None = None,
        kept: Sequence[torch.Tensor] = (),
    ) -> None:
        """A stream waits for another, or for the current one, and keeps tensors until it has used them."""
        if stream is None:
            return
        stream.wait_stream(of or torch.cuda.current_stream(self._data.device))
        for one in kept:
            one.record_stream(stream)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
