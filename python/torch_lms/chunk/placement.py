"""Where masters and the optimizer's state are kept, and where they are updated.

Note [Chunks that stay]
What lies on the device is updated there at once; everything else has to stream through it. How much room there is for
chunks that stay is known when a step has been seen: its peak, with all masters on the host as far as these fit, is what
everything else needs (the seed, section 6.3: its warm-up iteration). The first step is not counted: libraries try
their algorithms in it. Then the chunks that are updated last in a backward stay, as many as there is room for: nothing
is left to hide their streams behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch.optim import Optimizer

from torch_lms.chunk.masters import Masters
from torch_lms.chunk.model_data import ModelData
from torch_lms.chunk.trials import step_seconds
from torch_lms.swap.link import measure_link

__all__ = ["Residence", "chosen_update", "hosted_chunks"]

UpdateOn = Literal["device", "host", "stream"]

_SHARE_THAT_STAYS = 0.5  # of the device: with less model data nothing has to be seen first
_FASTER = 0.8  # a processor rounds otherwise than the device: it has to be worth it
_TRIED_NUMEL = 1 << 22
_MARGIN_SHARE = 0.03  # of the device, for what lies in pieces
_COUNTED_STEP = 2


def chosen_update(optimizer: Optimizer, device: torch.device, needed: Mapping[str, int], device_bytes: int) -> UpdateOn:
    """Where masters are best updated, by the device's room and by rates that are measured here.

    Args:
        optimizer: is tried on the host.
        device: of the model.
        needed: bytes of the model's data, by what they hold.
        device_bytes: that the program may use there.
    """
    if device.type == "cpu" or sum(needed.values()) <= _SHARE_THAT_STAYS * device_bytes:
        return "device"
    link = measure_link(str(device))
    bytes_each = 4 * (needed["masters"] + needed["optimizer state"]) / max(1, needed["masters"])
    stream_s = bytes_each / (1e6 * min(link.in_bytes_per_us, link.out_bytes_per_us))
    return "host" if step_seconds(optimizer, _TRIED_NUMEL) / _TRIED_NUMEL < _FASTER * stream_s else "stream"


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
