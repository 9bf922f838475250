"""What carries values over borders, for the shapes of a step's arguments.

Note [Shapes of a step]: the arguments of a step may have other shapes than those of the step before. What crosses a
border depends on what the stages before it are given, which other ranks may not have: so all ranks tell each other the
shapes of what their stages are given, before a step. For shapes that are new, one microbatch runs through all stages
to find what crosses; that is remembered for each set of shapes. Receive buffers are there for the present shapes only:
they are made again when these change, so that many lengths need no more memory than the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from torch_lms._torch_compat import tree_flatten
from torch_lms.pipeline.backend import Backend
from torch_lms.pipeline.boundary import Boundary, Crossing, Microbatch
from torch_lms.pipeline.messages import Messages
from torch_lms.pipeline.transfers import Channel
from torch_lms.ranks.members import Members
from torch_lms.schedules.actions import Schedule

__all__ = ["Transport", "shapes_of"]


def shapes_of(feeds: Mapping[str, Any]) -> Hashable:
    """Shapes and types of the tensors among arguments; of all else only what kind it is."""
    return tuple((name, *_shapes_in(feeds[name])) for name in sorted(feeds))


def _shapes_in(value: Any) -> tuple[Hashable, ...]:
    leaves, structure = tree_flatten(value)
    kinds = [
        (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        for leaf in leaves
    ]
    return str(structure), *kinds


class Transport:
    """This rank's end of all borders; see Note [Shapes of a step].

    Args:
        boundaries: of this rank's stages.
        members: the ranks of the pipeline.
        messages: among them.
        channel: for the values of the first run.
        make: makes what runs a step once the boundaries know what crosses.
    """

    def __init__(
        self,
        boundaries: Sequence[Boundary],
        members: Members,
        messages: Messages,
        channel: Channel,
        make: Callable[[], Backend],
    ) -> None:
        self._boundaries, self._messages, self._channel, self._make = boundaries, messages, channel, make
        self._ranks = members.count
        self._before, self._after = (members.place - 1) % members.count, (members.place + 1) % members.count
        self._known: dict[Hashable, list[Crossing]] = {}
        self._shapes: Hashable = None
        self._backend: Backend | None = None

    @property
    def schedule(self) -> Schedule | None:
        """What each rank does; None before the first step."""
        return None if self._backend is None else self._backend.schedule

    def take(self, shapes: Hashable, microbatch: Microbatch) -> Backend:
        """What runs a step of these shapes; all ranks call it alike.

        Args:
            shapes: of the arguments of all ranks.
            microbatch: the first one, for the run that finds what crosses borders.
        """
        if self._backend is not None and shapes == self._shapes:
            return self._backend
        self._backend = None  # its buffers go first
        if shapes in self._known:
            for boundary, crossing in zip(self._boundaries, self._known[shapes], strict=True):
                boundary.crossing = crossing
        else:
            self._find_crossings(microbatch)
            self._known[shapes] = [boundary.crossing for boundary in self._boundaries]
        self._shapes, self._backend = shapes, self._make()
        return self._backend

    def _find_crossings(self, microbatch: Microbatch) -> None:
        """Finds what crosses each border, stage after stage, with what does."""
        carriers: list[torch.Tensor] = []
        microbatch = microbatch.before_all()
        for boundary in self._boundaries:
            index = boundary.stage.index
            template = self._messages.hear(f"border/{index}", self._before) if index else None
            if index and self._ranks > 1:
                carriers = boundary.empty_carriers(template)
                self._channel.exchange([], self._after, carriers, self._before)
            carriers = boundary.prepare(template, carriers, microbatch)
            if not boundary.is_last:
                self._messages.tell(f"border/{index + 1}", boundary.crossing.outgoing)
                if self._ranks > 1:
                    self._channel.exchange(carriers, self._after, [], self._before)
