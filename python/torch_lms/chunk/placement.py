"""Where masters and the optimizer's state are kept, and where they are updated.

Note [Chunks that stay]
What lies on the device is updated there at once; everything else has to stream through it. How much room there is for
chunks that stay is known when a step has been seen: its peak, with all masters on the host as far as these fit, is what
everything else needs (the warm-up iteration of PatrickStar). The first step is not counted: libraries try
their algorithms in it. Then the chunks that are updated last in a backward stay, as many as there is room for: nothing
is left to hide their streams behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.optim import Optimizer

from torch_lms.chunk.masters import Masters
from torch_lms.chunk.model_data import ModelData
from torch_lms.chunk.trials import update_seconds
from torch_lms.swap.link import measure_link

__all__ = ["Residence", "UpdateChoice", "UpdateRates", "chosen_update", "hosted_chunks", "measured_rates"]

UpdateOn = Literal["device", "host", "stream"]

_SHARE_FOR_DATA = 0.5  # of the device, for the model's data, as long as no step has shown how much there is
_FASTER = 0.8  # a processor rounds otherwise than the device: it has to be worth it
_TRIED_NUMEL = 1 << 24
_DEVICE_BYTES_FOR_EACH = 256  # that is tried there: what it takes is an eighth of the device at most
_NARROW_BYTES = 2  # of a gradient that goes to the host, and of the parameter that comes from there
_MARGIN_SHARE = 0.03  # of the device, for what lies in pieces
_COUNTED_STEP = 2


@dataclass(frozen=True, kw_only=True)
class UpdateRates:
    """What an update takes, as it was measured at the start.

    Attributes:
        out_bytes_per_us: of copies from the device to the host.
        in_bytes_per_us: the other way.
        device_ns: that the device takes for each element; endless if the optimizer cannot be tried.
        host_ns: likewise, the host's processor.
    """

    out_bytes_per_us: float
    in_bytes_per_us: float
    device_ns: float
    host_ns: float

    def ns_each(self, kept_bytes: int) -> dict[UpdateOn, float]:
        """What an element takes that has no room on the device, by where it is updated.

        Args:
            kept_bytes: of its master and of what the optimizer keeps of it.
        """
        out_ns, in_ns = 1e3 / self.out_bytes_per_us, 1e3 / self.in_bytes_per_us
        return {
            "device": kept_bytes * (out_ns + in_ns) + self.device_ns,  # paged: one goes before another comes
            "stream": max(kept_bytes * out_ns, kept_bytes * in_ns, self.device_ns),  # side by side
            "host": max(_NARROW_BYTES * out_ns, _NARROW_BYTES * in_ns, self.host_ns),
        }


@dataclass(frozen=True, kw_only=True)
class UpdateChoice:
    """Where masters are updated, and why.

    Attributes:
        update_on: where.
        given: whether the program has said so.
        beyond_bytes: of the model's data that the device is taken to have no room for; 0 if it was not looked at.
        rates: that were measured; None where nothing had to be.
        ns_each: what an element without room on the device takes by these, by where it is updated.
    """

    update_on: UpdateOn
    given: bool = False
    beyond_bytes: int = 0
    rates: UpdateRates | None = None
    ns_each: Mapping[UpdateOn, float] = field(default_factory=dict)


def chosen_update(
    needed: Mapping[str, int],
    device: torch.device,
    device_bytes: int,
    measure: Callable[[], UpdateRates],
    may_stream: Callable[[], bool],
) -> UpdateChoice:
    """Where masters are best updated: on the device if there is room, else where it takes least.

    Processors and GPUs do not round alike: the host has to be faster by a fifth.

    Args:
        needed: bytes of the model's data, by what they hold.
        device: of the model.
        device_bytes: that the program may use there.
        measure: the rates; called if there is a choice.
        may_stream: whether the optimizer can; likewise.
    """
    beyond_bytes = sum(needed.values()) - int(_SHARE_FOR_DATA * device_bytes)
    if device.type == "cpu" or beyond_bytes <= 0:
        return UpdateChoice(update_on="device")
    rates = measure()
    kept_bytes = 4 * (needed["masters"] + needed["optimizer state"]) // max(1, needed["masters"])
    ns_each = rates.ns_each(kept_bytes)
    best: UpdateOn = "device" if ns_each["device"] < ns_each["stream"] or not may_stream() else "stream"
    if ns_each["host"] < _FASTER * ns_each[best]:
        best = "host"
    return UpdateChoice(update_on=best, beyond_bytes=beyond_bytes, rates=rates, ns_each=ns_each)


def measured_rates(
    optimizer: Optimizer, device: torch.device, dtype: torch.dtype, *, chunk_numel: int, device_bytes: int
) -> UpdateRates:
    """Of the link, and of updates of one chunk, or of a part of it that no cache holds; takes a second at most.

    Args:
        optimizer: is tried; nothing of it changes.
        device: of the model.
        dtype: of parameters and gradients.
        chunk_numel: elements of a chunk.
        device_bytes: that the program may use there.
    """
    link = measure_link(str(device))
    numel = max(1, min(chunk_numel, _TRIED_NUMEL, device_bytes // _DEVICE_BYTES_FOR_EACH))
    device_ns, host_ns = (
        1e9 * update_seconds(optimizer, numel, where, dtype) / numel for where in (device, torch.device("cpu"))
    )
    return UpdateRates(
        out_bytes_per_us=link.out_bytes_per_us,
        in_bytes_per_us=link.in_bytes_per_us,
        device_ns=device_ns,
        host_ns=host_ns,
    )


def hosted_chunks(update_on: UpdateOn, bytes_of: Sequence[int], host_bytes: int) -> list[bool]:
    """Whether each chunk's masters and state begin on the host: all, or as many of the last as it has room for.

    Args:
        update_on: where they are updated.
        bytes_of: each chunk's masters and state; 0 for those that are on the device in any case.
        host_bytes: for all of them.
    """
    found, left_bytes = [False] * len(bytes_of), host_bytes
    for chunk in reversed(range(len(bytes_of))):
        if update_on != "device" and 0 < bytes_of[chunk] <= left_bytes:
            found[chunk] = True
            left_bytes -= bytes_of[chunk]
    return found


class Residence:
    """Finds out which chunks may stay on the device, and has them stay.

    See Note [Chunks that stay].

    Args:
        data: of the model.
        masters: of it.
        device_bytes: that the program may use on the device.
    """

    def __init__(self, data: ModelData, masters: Masters, device_bytes: int) -> None:
        self._data = data
        self._masters = masters
        self._device_bytes = device_bytes
        self._steps = 0

    def step_ended(self) -> None:
        """Of the optimizer."""
        self._steps += 1
        if self._steps == _COUNTED_STEP - 1:
            torch.cuda.reset_peak_memory_stats(self._data.device)
        elif self._steps == _COUNTED_STEP:
            peak_bytes = torch.cuda.max_memory_reserved(self._data.device)
            self.fill(self._device_bytes - peak_bytes - int(_MARGIN_SHARE * self._device_bytes))

    def fill(self, room_bytes: int) -> None:
        """Moves chunks to the device, those first that backward updates last.

        Args:
            room_bytes: for them.
        """
        for chunk, on_host in enumerate(self._data.on_host):
            if on_host and self._data.kept_bytes(chunk) <= room_bytes:
                room_bytes -= self._data.kept_bytes(chunk)
                self._masters.bring_home(chunk)
