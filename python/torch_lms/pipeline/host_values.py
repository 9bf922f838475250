"""What crosses borders from program to program: Python numbers, and the states of random generators.

On the device they would have to be waited for, both where they leave and where they arrive, and a program that waits
for its device is no longer ahead of it. Between programs they come before the tensors do.
"""

from __future__ import annotations

from typing import Any

from torch_lms.pipeline.messages import Messages

__all__ = ["HostValues"]


class HostValues:
    """Values of microbatches, from the rank of a stage to that of the next.

    Args:
        messages: among the ranks.
        ranks: how many; stage s is on rank ``s % ranks``.
    """

    def __init__(self, messages: Messages, ranks: int) -> None:
        self._messages, self._ranks, self._run = messages, ranks, ""

    def start(self, run: str) -> None:
        """Begins a run of microbatches through all stages.

        Args:
            run: its name, the same on all ranks and not used before.
        """
        self._run = run

    def tell(self, stage: int, microbatch: int, value: Any) -> None:
        """Leaves what goes into a stage."""
        self._messages.tell(f"{self._run}/{stage}/{microbatch}", value)

    def hear(self, stage: int, microbatch: int) -> Any:
        """What goes into a stage; waits for it.

        Raises:
            PipelineError: as `Messages.hear`.
        """
        return self._messages.hear(f"{self._run}/{stage}/{microbatch}", (stage - 1) % self._ranks)
