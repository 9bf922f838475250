"""Model data in chunks: lists of equal chunks, and the tensors that are views of them.

Note [Parts of chunks]
Several ranks that train one model each keep one part of every chunk, as many elements as any other rank: of parameters,
masters and optimizer state. A tensor may be cut anywhere: an optimizer that treats each element alone does not mind. So
a master is all of its tensor, in its shape, or the piece of it that lies in this rank's part, flat and in the order of
memory. Only parameters that are their own masters are whole everywhere.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from torch_lms.chunk.gathered import GatheredChunks
from torch_lms.chunk.layout import Layout, Piece, Place, piece_of
from torch_lms.chunk.pinned import pinned_zeros
from torch_lms.chunk.portions import Extent
from torch_lms.chunk.ranks import ALONE, Ranks
from torch_lms.errors import ChunkError
from torch_lms.memory_sizes import size_text

__all__ = ["ChunkList", "ModelData", "ModelTensor", "same_bytes", "view_in"]


@dataclass(frozen=True, kw_only=True)
class ModelTensor:
    """One parameter of the model.

    Attributes:
        name: in the model.
        parameter: itself.
        group: of the optimizer, by number; None for a parameter that no optimizer updates, or that is frozen.
        wide: whether the model computes with 32 bits of it: it is its own master.
    """

    name: str
    parameter: nn.Parameter
    group: int | None
    wide: bool


class ChunkList:
    """Chunks for one kind of number, or this rank's parts of them: each is one storage, and moves as one.

    Args:
        numels: elements of each.
        dtype: of the numbers.
        devices: to allocate on, of each.
        pins: whether what is on the host is pinned.
    """

    def __init__(
        self, numels: Sequence[int], dtype: torch.dtype, devices: Sequence[torch.device], *, pins: bool = False
    ) -> None:
        self._numels = numels
        self._dtype = dtype
        self._devices = devices
        self._pins = pins
        self._chunks: dict[int, torch.Tensor] = {}

    @property
    def allocated_bytes(self) -> int:
        """Of all chunks that anything has been written to."""
        return sum(chunk.nbytes for chunk in self._chunks.values())

    @property
    def used(self) -> frozenset[int]:
        """The chunks that anything has been written to."""
        return frozenset(self._chunks)

    def chunk(self, number: int) -> torch.Tensor:
        """All of a chunk, or of this rank's part; zeros where nothing has been written."""
        if number not in self._chunks:
            numel, device = self._numels[number], self._devices[number]
            pinned = self._pins and device.type == "cpu"
            self._chunks[number] = (
                pinned_zeros(numel, self._dtype) if pinned else torch.zeros(numel, dtype=self._dtype, device=device)
            )
        return self._chunks[number]

    def move(self, number: int) -> torch.Tensor | None:
        """A chunk goes to where `devices` says that it is by now; None if nothing has been written to it."""
        found = self._chunks.pop(number, None)
        return None if found is None else self.chunk(number).copy_(found)


def view_in(chunk: torch.Tensor, place: Place, like: torch.Tensor) -> torch.Tensor:
    """A tensor's place in a chunk, in the shape of `like`, and with its strides where they leave no gaps."""
    stride = torch.empty_like(like, device="meta").stride()
    return torch.as_strided(chunk, like.shape, stride, place.offset)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both tensors are the same place of the same storage."""
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.stride() == other.stride()
    )


class ModelData:
    """The lists of a model: its parameters, their 32-bit masters, and what an optimizer keeps for each.

    Chunks of the same number hold the same tensors in all lists. Parameters that no optimizer updates have no masters.

    Not thread-safe.

    Args:
        tensors: in the layout's order.
        layout: of these.
        dtype: of parameters and gradients.
        device: of the parameters.
        update_on: where what is on the host is updated.
        on_host: whether each chunk's masters and optimizer state are on the host. Parameters that are their own masters
            are on the device.
        ranks: that keep a part of each chunk; all get the first one's numbers.

    Raises:
        ChunkError: if there is no room; the parameters are as they were then.
    """

    def __init__(
        self,
        tensors: Sequence[ModelTensor],
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        update_on: Literal["device", "host", "stream"],
        on_host: Sequence[bool],
        ranks: Ranks = ALONE,
    ) -> None:
        self.tensors = tuple(tensors)
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self.ranks = ranks
        self.update_on = update_on
        wide = {place.chunk for one, place in zip(tensors, layout.places, strict=True) if one.wide}
        self.is_cut = [ranks.size > 1 and chunk not in wide for chunk in range(layout.chunks)]
        self.part_numel = layout.chunk_numel // ranks.size
        self._numels = [self.part_numel if cut else layout.chunk_numel for cut in self.is_cut]
        self.on_host = [on_host[chunk] and chunk not in wide for chunk in range(layout.chunks)]
        self.homes = [torch.device("cpu") if on_host else device for on_host in self.on_host]
        self.parameters = ChunkList(self._numels, dtype, [device] * layout.chunks)
        self.gathered = GatheredChunks(layout, dtype, device, ranks)
        self._pins = update_on == "stream" and device.type == "cuda"
        self._masters = ChunkList(self._numels, torch.float32, self.homes, pins=self._pins)
        self._states: dict[tuple[str, torch.dtype], ChunkList] = {}
        self.settle_masters: Callable[[], None] = _nothing  # called before masters on the host are looked at
        self.numbers = {one.parameter: number for number, one in enumerate(tensors)}
        self.unfilled: set[int] = set()  # of a model on the meta device: what is to be loaded
        self.in_chunk: list[list[int]] = [[] for _ in range(layout.chunks)]
        self.views: list[torch.Tensor] = []
        self.masters: list[torch.Tensor | None] = []
        for number in range(len(tensors)):
            self.in_chunk[layout.places[number].chunk].append(number)
        self._take_memory()
        for number in range(len(tensors)):
            self._fill(number)

    def _take_memory(self) -> None:
        """Gives parameters and masters their places, before any parameter changes. If one rank fails, all do.

        Raises:
            ChunkError: if there is no room; nothing has changed then.
        """
        try:
            with self.ranks.together():
                for chunk, numbers in enumerate(self.in_chunk):
                    for number in numbers:
                        self._lay_out(number)
                    self.gathered.release((chunk,))
        except (RuntimeError, OSError, MemoryError) as error:
            needed = " and ".join(f"{size_text(nbytes)} on {there}" for there, nbytes in self._first_bytes().items())
            traceback.clear_frames(error.__traceback__)
            vars(self).clear()  # who keeps the error would keep all memory that has been taken
            found = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ChunkError(
                f"expected room for chunks of parameters and masters, {needed}, beside the model as it is, found "
                f"{found}; nothing has changed: free memory there, use more ranks, or make the model on the meta "
                "device and load it into its chunks (device=)"
            ) from error

    def _first_bytes(self) -> Counter[torch.device]:
        """What parameters and masters take, by device. All tensors of a chunk are alike in kind."""
        found: Counter[torch.device] = Counter()
        for numel, home, numbers in zip(self._numels, self.homes, self.in_chunk, strict=True):
            one = self.tensors[numbers[0]]
            found[self.device] += 0 if one.wide else numel * self.dtype.itemsize
            found[home] += 0 if one.group is None else numel * torch.float32.itemsize
        return found

    def _lay_out(self, number: int) -> None:
        one, chunk, place = self.tensors[number], self.chunk_of(number), self.layout.places[number]
        given = one.parameter.detach()
        if one.wide:
            has_none = given.is_meta and one.group is None
            self.views.append(torch.zeros_like(given, device=self.device) if has_none else given)
        else:
            part = self.parameters.chunk(chunk)
            self.views.append(view_in(self.gathered.whole(chunk) if self.is_cut[chunk] else part, place, given))
        master = None
        if one.group is not None and (not self.is_cut[chunk] or self.piece(number).numel):
            master = self.part_of(self._masters.chunk(chunk), number)
        self.masters.append(master)
        if one.wide and master is not None:
            self.views[number] = master

    @torch.no_grad()
    def _fill(self, number: int) -> None:
        """The parameter gets its place, which gets its numbers."""
        one, view, master = self.tensors[number], self.views[number], self.masters[number]
        given = one.parameter.detach()
        if given.is_meta:  # it cannot be given other bytes
            self.unfilled.add(number)
            filled = nn.Parameter(view.data, requires_grad=one.parameter.requires_grad)  # its own version
            torch.utils.swap_tensors(one.parameter, filled)
            return
        self.ranks.broadcast(given)
        if master is not None:
            master.copy_(self.own_part(number, given))
        if not one.wide:
            self.parameter_part(number).copy_(self.own_part(number, given))
        one.parameter.data = view

    def chunk_of(self, number: int) -> int:
        """The chunk that a tensor lies in."""
        return self.layout.places[number].chunk

    def piece(self, number: int) -> Piece:
        """What this rank keeps of a tensor whose chunk is cut."""
        return piece_of(self.layout.places[number], self.part_numel, self.ranks.rank)

    def part_of(self, chunk: torch.Tensor, number: int) -> torch.Tensor:
        """The place of a tensor, or of this rank's piece of it, in one of the lists' chunks.

        See Note [Parts of chunks].
        """
        if not self.is_cut[self.chunk_of(number)]:
            return view_in(chunk, self.layout.places[number], self.views[number])
        piece = self.piece(number)
        return chunk[piece.offset : piece.offset + piece.numel]

    def own_part(self, number: int, whole: torch.Tensor) -> torch.Tensor:
        """Of a tensor in a parameter's shape, what goes to `part_of`."""
        if not self.is_cut[self.chunk_of(number)]:
            return whole
        piece, like = self.piece(number), self.views[number]
        if whole.stride() != like.stride():
            whole = torch.empty_like(like, dtype=whole.dtype, device=whole.device).copy_(whole)
        return whole.as_strided((whole.numel(),), (1,))[piece.begin : piece.begin + piece.numel]

    def parameter_part(self, number: int) -> torch.Tensor:
        """What this rank keeps of a parameter."""
        return self.part_of(self.parameters.chunk(self.chunk_of(number)), number)

    def whole_parameter(self, number: int) -> torch.Tensor:
        """A parameter in its shape, from all ranks' pieces: every rank must ask for it. On the host, if it is cut."""
        return self.views[number] if self.tensors[number].wide else self._whole(self.parameters, number)

    def whole_master(self, number: int) -> torch.Tensor:
        """A master, likewise."""
        return self._whole(self._masters, number)

    def whole_state(self, key: str, dtype: torch.dtype, number: int) -> torch.Tensor:
        """What the optimizer keeps for a tensor, likewise."""
        return self._whole(self._list_of(key, dtype), number)

    def _whole(self, chunks: ChunkList, number: int) -> torch.Tensor:
        self.settle_masters()
        chunk, place = self.chunk_of(number), self.layout.places[number]
        part = chunks.chunk(chunk)
        if not self.is_cut[chunk]:
            return view_in(part, place, self.views[number])
        return view_in(self.ranks.joined(part.to(self.device)), place, self.views[number]).to("cpu")

    def _list_of(self, key: str, dtype: torch.dtype) -> ChunkList:
        return self._states.setdefault((key, dtype), ChunkList(self._numels, dtype, self.homes, pins=self._pins))

    def own_tensor(self, number: int) -> torch.Tensor:
        """What this rank keeps of a tensor, in as many bits as there are: of its master, or of the parameter."""
        self.settle_masters()
        if self.tensors[number].group is not None:
            return self.part_of(self._masters.chunk(self.chunk_of(number)), number)
        return self.views[number] if self.tensors[number].wide else self.parameter_part(number)

    def master(self, number: int) -> torch.Tensor:
        """Of a tensor that an optimizer updates, as it is after all updates so far."""
        if self.on_host[self.chunk_of(number)]:
            self.settle_masters()
        master = self.masters[number]
        assert master is not None
        return master

    def parameter_view(self, number: int) -> torch.Tensor:
        """A new tensor of a parameter's place. It is no view itself: views of it refer to it."""
        return self.views[number].data

    def tensor_to_update(self, number: int) -> torch.Tensor:
        """The master, or the parameter of which there is none."""
        master = self.masters[number]
        return self.tensors[number].parameter if master is None else master

    def adopt(
        self, number: int, state: Mapping[str, torch.Tensor], known: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Moves what an optimizer keeps for a tensor in its master's shape to chunks.

        Args:
            number: of the tensor.
            state: that is to lie there, by key.
            known: what has been adopted before, by key; what is new is added.

        Returns:
            What takes the place of values in `state`, by key.
        """
        moved = {}
        for key, value in state.items():
            if value is known.get(key):
                continue
            if key not in known or known[key].dtype != value.dtype:
                known[key] = self.known_view(number, key, value.dtype)
            moved[key] = known[key].copy_(value)
        return moved

    def known_view(self, number: int, key: str, dtype: torch.dtype) -> torch.Tensor:
        """The place in chunks of what an optimizer keeps for a tensor."""
        return self.part_of(self._list_of(key, dtype).chunk(self.chunk_of(number)), number)

    def kept(self, chunk: int) -> dict[tuple[str, torch.dtype], torch.Tensor]:
        """What an optimizer keeps of a chunk, by key and type: the state's lists, as far as they are used."""
        return {key: chunks.chunk(chunk) for key, chunks in self._states.items() if chunk in chunks.used}

    def masters_of(self, chunk: int) -> torch.Tensor:
        """The masters' chunk."""
        return self._masters.chunk(chunk)

    def kept_bytes(self, chunk: int) -> int:
        """Of a chunk's masters, and of what an optimizer keeps of it by now."""
        return self.masters_of(chunk).nbytes + sum(one.nbytes for one in self.kept(chunk).values())

    @torch.no_grad()
    def bring_home(self, chunk: int) -> None:
        """A chunk's masters, and what the optimizer keeps of it, are on the device from now on.

        Views of what the optimizer keeps are those of before: they are to be replaced by `known_view`.
        """
        self.settle_masters()
        self.on_host[chunk], self.homes[chunk] = False, self.device
        for chunks in (self._masters, *self._states.values()):
            chunks.move(chunk)
        for number in self.in_chunk[chunk]:
            if (master := self.masters[number]) is not None:
                master.data = self.part_of(self._masters.chunk(chunk), number)

    def extents(self, chunk: int) -> list[Extent]:
        """Where what this rank keeps of the tensors that have masters lies, in order."""
        found = []
        for number in self.in_chunk[chunk]:
            place = self.piece(number) if self.is_cut[chunk] else self.layout.places[number]
            if self.masters[number] is not None:
                found.append(Extent(number=number, offset=place.offset, numel=place.numel))
        return found

    def allocated_bytes(self) -> dict[str, int]:
        """Bytes of the lists, by what they hold."""
        found = {"parameters": self.parameters.allocated_bytes, "masters": self._masters.allocated_bytes}
        for (key, _), chunks in self._states.items():
            found[key] = found.get(key, 0) + chunks.allocated_bytes
        return found


def _nothing() -> None:
    pass
