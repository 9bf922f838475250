"""Random numbers as on one device: a microbatch takes its generator's state along from stage to stage.

Each microbatch starts from a seed of its own, and each stage goes on where the one before stopped. So dropout draws the
same masks whatever the partition, the schedule and the number of ranks, and on a single device
``torch.manual_seed(seed)`` before each microbatch draws them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["RandomStream"]


class RandomStream:
    """The default generator of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state(self) -> torch.Tensor:
        """The generator's state, as bytes on the host; the device is not waited for."""
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state()

    def _set(self, state: torch.Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)

    def _seed(self, seed: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

    @contextmanager
    def continued(self, state: torch.Tensor | None, seed: int) -> Iterator[None]:
        """Goes on from a state, or begins with a seed; afterwards the program's own state is back."""
        before = self.state()
        if state is None:
            self._seed(seed)
        else:
            self._set(state)
        try:
            yield
        finally:
            self._set(before)
