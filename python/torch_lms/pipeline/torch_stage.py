"""A stage of torch.distributed.pipelining, which is imported here and so has to be there.

Note [Own traffic]: PyTorch's schedules of several stages ask for what comes in an order that takes all actions for
equally long. NCCL does what a group is given one after the other, so that a receive whose values are late holds up all
that come after it: on four H200s they took 1.2 and 1.4 times as long as predicted. And they keep room for each
microbatch, and all that was sent, until the step ends. So stages give PyTorch nothing to transfer, and do it themselves
(``border_traffic``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import PipelineStage

from torch_lms.pipeline.border_traffic import BorderTraffic
from torch_lms.pipeline.boundary import Boundary
from torch_lms.pipeline.weight_groups import Outputs, backward_of_weights, merge_groups
from torch_lms.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action
from torch_lms.stages.folding import recomputes

if TYPE_CHECKING:
    from torch_lms.pipeline.executor import Recorder

__all__ = ["OwnStage"]


class OwnStage(PipelineStage):  # type: ignore[misc, unused-ignore]
    """Tells the recorder when its actions run, and receives and sends by itself; see Note [Own traffic].

    Args:
        boundary: the stage, which knows what crosses its borders.
        group: of the ranks.
        recorder: notes when actions run.

    Attributes:
        traffic: of this rank's stages; set before the first step, as it needs the schedule, which needs the stages.
    """

    traffic: BorderTraffic
    _received: Sequence[torch.Tensor] | None = None
    _done: Action

    def __init__(self, boundary: Boundary, group: Any, recorder: Recorder) -> None:
        self._recorder, self._recomputes = recorder, recomputes(boundary.stage.code)
        crossing, loss_like = boundary.crossing, boundary.crossing.loss_like
        super().__init__(
            boundary,
            boundary.stage.index,
            boundary.stage.count,
            boundary.device,
            input_args=boundary.metas(crossing.incoming),
            output_args=boundary.metas(crossing.outgoing) if loss_like is None else loss_like.requires_grad_(),
            group=group,
        )

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """A forward."""
        return self._record(FORWARD, fwd_chunk_id, super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: Any = False
    ) -> Any:
        """A backward, or its part for the inputs."""
        kind = BACKWARD if full_backward else INPUT_BACKWARD
        rest = {"loss": loss, "full_backward": full_backward, "last_backward": last_backward}
        if full_backward:
            return self._record(kind, bwd_chunk_id, super().backward_one_chunk, **rest)
        cached = getattr(self, "fwd_cache", {}).get(bwd_chunk_id, ((), ()))  # 2.15 has none, and holds them itself
        outputs = Outputs(cached[0])
        result = self._record(kind, bwd_chunk_id, super().backward_one_chunk, **rest)
        values, groups, *others = self.backward_state[bwd_chunk_id]
        if groups:
            groups = merge_groups(groups, recomputes=self._recomputes)
            outputs.live_as_long_as(groups)
        self.backward_state[bwd_chunk_id] = (values, groups, *others)
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The rest of a backward."""
        return self._record(WEIGHT_BACKWARD, bwd_chunk_id, super().backward_weight_one_chunk, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """PyTorch's own, but for the backward of weights; see Note [As they were kept] in ``weight_groups``."""
        if backward_type != "weight":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *args, **kwargs)
        backward_of_weights(bwd_kwargs["param_groups"])
        return (), None

    def _record(self, kind: str, microbatch: int, run: Any, *args: Any, **kwargs: Any) -> Any:
        self._done = Action(self.stage_index, kind, microbatch)
        self._received = self.traffic.before(self._done)
        self._recorder.begin(self._done)
        result = run(microbatch, *args, **kwargs)
        self._recorder.end(self._done)
        return result

    def _take(self, otherwise: Any, rooms: Any, microbatch: int) -> Any:
        """What has come from another rank; else what PyTorch has, from a stage of this one, and would keep."""
        received, self._received = self._received, None
        if received is not None:
            return tuple(received)
        values = otherwise(microbatch)
        for room in rooms[microbatch]:
            if getattr(room, "buffer", None) is not None:  # 2.15 has let go of it
                room.buffer = torch.empty(0, device="meta")
        return values

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        values = self._take(super()._retrieve_recv_activations, self.args_recv_info, fwd_chunk_id)
        return tuple(value.requires_grad_() for value in values)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        return self._take(super()._retrieve_recv_grads, self.grad_recv_info, bwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Nothing: it was asked for."""
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Nothing: it was asked for."""
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Nothing: what PyTorch would send goes its own way."""
        return self._send(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Nothing: what PyTorch would send goes its own way."""
        return self._send(super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, operations: Sequence[Any]) -> list[Any]:
        self.traffic.after(self._done, [operation.tensor for operation in operations])
        return []

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Of PyTorch 2.11: nothing where a lone rank would send to itself, which Gloo refuses."""
        return super()._get_init_p2p_neighbors_ops() if self.group_size > 1 else []

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_room(super()._prepare_forward_infra, *args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_room(super()._prepare_backward_infra, *args, **kwargs)

    def _without_room(self, prepare: Any, *args: Any, **kwargs: Any) -> Any:
        """Has PyTorch make its buffers, which are not used, on no device."""
        device, self.device = self.device, torch.device("meta")
        try:
            return prepare(*args, **kwargs)
        finally:
            self.device = device
