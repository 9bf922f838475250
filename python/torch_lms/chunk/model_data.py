"""Model data in chunks: lists of equal chunks, and the tensors that are views of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from torch_lms.chunk.layout import Layout, Place

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
    """Equal chunks for one kind of number: each is one storage, and moves as one.

    Args:
        layout: of the tensors.
        dtype: of the numbers.
        devices: to allocate on, of each chunk.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, devices: Sequence[torch.device]) -> None:
        self._layout = layout
        self._dtype = dtype
        self._devices = devices
        self._chunks: dict[int, torch.Tensor] = {}

    @property
    def allocated_bytes(self) -> int:
        """Of all chunks that anything has been written to."""
        return sum(chunk.nbytes for chunk in self._chunks.values())

    def chunk(self, number: int) -> torch.Tensor:
        """All of a chunk; zeros where nothing has been written."""
        if number not in self._chunks:
            self._chunks[number] = torch.zeros(
                self._layout.chunk_numel, dtype=self._dtype, device=self._devices[number]
            )
        return self._chunks[number]

    def view(self, tensor: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor's place, as `view_in` has it."""
        place = self._layout.places[tensor]
        return view_in(self.chunk(place.chunk), place, like)


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
        update_on: where masters and optimizer state are: on the device, or on the host. Parameters that are their own
            masters are on the device.
    """

    def __init__(
        self,
        tensors: Sequence[ModelTensor],
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        update_on: Literal["device", "host"],
    ) -> None:
        self.tensors = tuple(tensors)
        self.layout = layout
        self.dtype = dtype
        self.device = device
        wide = {place.chunk for one, place in zip(tensors, layout.places, strict=True) if one.wide}
        self.on_host = [update_on == "host" and chunk not in wide for chunk in range(layout.chunks)]
        self.homes = [torch.device("cpu") if on_host else device for on_host in self.on_host]
        self.parameters = ChunkList(layout, dtype, [device] * layout.chunks)
        self._masters = ChunkList(layout, torch.float32, self.homes)
        self._states: dict[tuple[str, torch.dtype], ChunkList] = {}
        self.numbers = {one.parameter: number for number, one in enumerate(tensors)}
        self.in_chunk: list[list[int]] = [[] for _ in range(layout.chunks)]
        self.views: list[torch.Tensor] = []
        self.masters: list[torch.Tensor | None] = []
        for number, one in enumerate(tensors):
            self.in_chunk[layout.places[number].chunk].append(number)
            self._fill(number, one)

    @torch.no_grad()
    def _fill(self, number: int, one: ModelTensor) -> None:
        given = one.parameter.detach()
        master = None if one.group is None else self._masters.view(number, given).copy_(given)
        self.masters.append(master)
        if one.wide:
            self.views.append(given if master is None else master)
        else:
            self.views.append(self.parameters.view(number, given).copy_(given))
        one.parameter.data = self.views[number]

    def master(self, number: int) -> torch.Tensor:
        """Of a tensor that an optimizer updates."""
        master = self.masters[number]
        assert master is not None
        return master

    def parameter_view(self, number: int) -> torch.Tensor:
        """A new tensor of a parameter's place."""
        return self.parameters.view(number, self.views[number])

    def tensor_to_update(self, number: int) -> torch.Tensor:
        """The master, or the parameter of which there is none."""
        master = self.masters[number]
        return self.tensors[number].parameter if master is None else master

    def adopt(
        self, number: int, state: Mapping[str, object], known: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Moves what an optimizer keeps for a tensor, and is of its shape, to chunks.

        Args:
            number: of the tensor.
            state: by key.
            known: what has been adopted before, by key; what is new is added.

        Returns:
            What takes the place of values in `state`, by key.
        """
        moved = {}
        for key, value in state.items():
            if (
                not isinstance(value, torch.Tensor)
                or value.shape != self.views[number].shape
                or value is known.get(key)
            ):
                continue
            if key not in known or known[key].dtype != value.dtype:
                chunks = self._states.setdefault((key, value.dtype), ChunkList(self.layout, value.dtype, self.homes))
                known[key] = chunks.view(number, self.views[number])
            moved[key] = known[key].copy_(value)
        return moved

    def allocated_bytes(self) -> dict[str, int]:
        """Bytes of the lists, by what they hold."""
        found = {"parameters": self.parameters.allocated_bytes, "masters": self._masters.allocated_bytes}
        for (key, _), chunks in self._states.items():
            found[key] = found.get(key, 0) + chunks.allocated_bytes
        return found
