"""Notes each op of a program as it runs, with the storages that it makes, reads and writes, and when they are freed.

It sees what runs below autograd: the ops of a backward, what autograd keeps, and for how long. Nothing is read of the
tensors' values, so that fake tensors will do.

Note [Sums of gradients]: where two gradients of one tensor meet, autograd adds one to the other in place if nobody
else holds it, except under a mode such as this one. So where an operand of such a sum ends with it, the sum counts as
made in that operand's storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from torch_lms._torch_compat import storage_bytes, storage_key, storage_weak_ref, tree_flatten
from torch_lms.profile.storages import dense_parts
from torch_lms.profile.writes import written_arguments

__all__ = ["RecordedOp", "RecordedStorage", "StepRecorder"]

_DROPOUT = "aten::native_dropout"
_DRAWS = "its op draws random numbers"
# They are run again without the running statistics that they have updated.
_BATCH_NORMS = ("aten::native_batch_norm", "aten::cudnn_batch_norm")
# Their results are not set by their inputs alone, though no schema says so.
_UNSETTLED = ("empty", "batch_norm", "rnn", "lstm", "gru", "resize", "fused_moving_avg")
_SUM = "aten::add"


@dataclass(eq=False)
class RecordedStorage:
    """One storage.

    Attributes:
        bytes: its size.
        lasting: whether it exists before the step and after it.
        producer: place of the op that made it; None for one that exists at the start.
        released: the last place at which somebody holds it; None if it lives to the end.
        uses: places that read or write it, after the producer.
        writes: those of them that write it.
    """

    bytes: int
    lasting: bool = False
    producer: int | None = None
    released: int | None = None
    uses: dict[int, None] = field(default_factory=dict)
    writes: dict[int, None] = field(default_factory=dict)


@dataclass(eq=False)
class RecordedOp:
    """One op.

    Attributes:
        name: such as ``aten::addmm``.
        phase: forward, backward or other.
        inputs: storages that it reads or writes.
        outputs: storages that it makes.
        moved_bytes: of all tensors that it reads and makes.
        flops: of products of matrices and the like; 0 where nobody has counted them.
        other_bytes: its working space, where the device tells it.
        why_not_again: why it cannot be run again with the same result; empty if it can.
        rewrites: the storage that it writes in place, and to nothing else, reading no other part of it; else None.
    """

    name: str
    phase: str
    inputs: list[RecordedStorage]
    outputs: list[RecordedStorage]
    moved_bytes: int
    flops: int
    other_bytes: int
    why_not_again: str
    rewrites: RecordedStorage | None = None

    def makes_again_from(self, storage: RecordedStorage) -> tuple[list[RecordedStorage], str]:
        """What one of its outputs can be made again from, and why it cannot be, or nothing.

        Dropout's result is made from the mask that it drew, which is its last output.
        """
        if self.why_not_again or self.name != _DROPOUT:
            return self.inputs, self.why_not_again
        mask = self.outputs[-1]
        return [*self.inputs, mask], _DRAWS if storage is mask else ""


class StepRecorder(TorchDispatchMode):
    """A mode under which a step is noted, op by op.

    Args:
        device: whose storages count.

    Attributes:
        ops: by place.
        storages: in the order in which they were seen.
        phase: of the ops that come next.
        device: whose storages count from now on.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[RecordedOp] = []
        self.storages: list[RecordedStorage] = []
        self.phase = "forward"
        self.device = device
        self._known: dict[int, RecordedStorage] = {}
        self._references: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            return func(*args, **kwargs)
        self.note_released()
        inputs = [self.storage_of(part) for part in self._parts((args, kwargs))]
        working_space = _WorkingSpace(self.device)
        value = func(*args, **kwargs)
        parts = list(self._parts(value))
        outputs = [self._made(part) for part in parts if storage_key(part) not in self._known]
        written = [self.storage_of(part) for part in self._parts(written_arguments(func, args, kwargs))]
        if not outputs and not written:
            return value
        place = len(self.ops)
        for storage in inputs:
            storage.uses[place] = None
        for storage in written:
            storage.writes[place] = None
        self.ops.append(
            RecordedOp(
                name=func._schema.name,
                phase=self.phase,
                inputs=list(dict.fromkeys(inputs)),
                outputs=outputs,
                moved_bytes=sum(part.numel() * part.element_size() for part in (*self._parts((args, kwargs)), *parts)),
                flops=_flops(func, args, kwargs, value),
                other_bytes=working_space.bytes(),
                why_not_again=_why_not_again(func, args, kwargs),
                rewrites=written[0] if _is_in_place(func) and inputs.count(written[0]) == 1 else None,
            )
        )
        return value

    def storage_of(self, tensor: torch.Tensor, *, lasting: bool = True) -> RecordedStorage:
        """The storage behind a tensor; one that no op was seen to make exists at the start.

        Args:
            tensor: dense, on the device.
            lasting: whether a new one is there after the step as well.
        """
        key = storage_key(tensor)
        if key not in self._known:
            self.alias(tensor, RecordedStorage(bytes=storage_bytes(tensor), lasting=lasting))
            self.storages.append(self._known[key])
        return self._known[key]

    def alias(self, tensor: torch.Tensor, storage: RecordedStorage) -> None:
        """Lets a tensor stand for a storage."""
        key = storage_key(tensor)
        self._known[key], self._references[key] = storage, storage_weak_ref(tensor)

    def note_released(self) -> None:
        """Notes which storages nobody holds any more, after the last op."""
        for key in [key for key, reference in self._references.items() if reference.expired()]:
            storage = self._known.pop(key)
            del self._references[key]
            if not storage.lasting:
                storage.released = max(len(self.ops) - 1, storage.producer or 0)

    def add_gradients_in_place(self) -> None:
        """See Note [Sums of gradients]; to be called when the backward is over."""
        joined: dict[RecordedStorage, RecordedStorage] = {}
        for place, op in enumerate(self.ops):
            op.inputs = list(dict.fromkeys(joined.get(one, one) for one in op.inputs))
            if op.phase != "backward" or op.name != _SUM or len(op.outputs) != 1:
                continue
            (made,) = op.outputs
            spent = [one for one in op.inputs if one.released == place and one.bytes == made.bytes]
            if spent and spent[0].producer is not None:
                joined[made] = spent[0]
                spent[0].uses |= made.uses
                spent[0].writes |= {place: None} | made.writes
                spent[0].released, op.outputs = made.released, []
        self.storages = [one for one in self.storages if one not in joined]
        self._known = {key: joined.get(one, one) for key, one in self._known.items()}

    def _made(self, tensor: torch.Tensor) -> RecordedStorage:
        storage = self.storage_of(tensor, lasting=False)
        storage.producer = len(self.ops)
        return storage

    def _parts(self, value: Any) -> Iterator[torch.Tensor]:
        """The dense tensors on the device among some arguments."""
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, torch.Tensor):
                yield from (part for part in dense_parts(leaf) if part.device == self.device)


class _WorkingSpace:
    """What a CUDA device's allocator gives to an op and gets back before the op ends; other devices do not tell."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def bytes(self) -> int:
        if self._device.type != "cuda":
            return 0
        return torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)


@cache
def _is_view(func: Any) -> bool:
    """Whether it only returns what it was given, perhaps in another shape."""
    returned = [one.alias_info for one in func._schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


@cache
def _is_in_place(func: Any) -> bool:
    """Whether it writes to one tensor and gives it back as it lies."""
    aliased = [one for one in func._schema.arguments if one.alias_info is not None]
    plain = torch.Tag.inplace_view not in func.tags and len(func._schema.returns) == 1
    return plain and len(aliased) == 1 and aliased[0].alias_info.is_write and not aliased[0].is_out


def _why_not_again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    schema = func._schema
    aliases = any(one.alias_info for one in schema.arguments)
    if not schema.name.startswith("aten::") or (aliases and not _is_in_place(func)):
        return "its op cannot be run again with the same result"
    if schema.name not in _BATCH_NORMS and any(word in schema.name for word in _UNSETTLED):
        return "its op has a state, or leaves memory as it found it"
    if torch.Tag.nondeterministic_seeded in func.tags:
        by_name = dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
        if schema.name == _DROPOUT:
            return "" if 0 < by_name["p"] < 1 and by_name.get("train") is not False else _DRAWS
        if "attention" not in schema.name or by_name.get("dropout_p", 0.0) != 0.0:
            return _DRAWS
    return ""


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> int:
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=value))
