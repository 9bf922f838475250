"""A model in chunks and its optimizer, for `torch.distributed.checkpoint`: each rank saves and loads what it has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_lms.chunk.optimizer import WITHOUT_STATE, ChunkedOptimizer
from torch_lms.chunk.pieces import PiecesOfTensor
from torch_lms.errors import ChunkError

__all__ = ["ShardedState"]


class ShardedState:
    """The state of a model in chunks and of its optimizer, by names, in pieces where ranks have pieces.

    ``dcp.save({"training": ShardedState(model, optimizer)}, ...)``, and `dcp.load` likewise, on any number of ranks
    and with any chunks. A plain model's 32-bit ``state_dict()`` can be loaded from ``training.model``.

    Args:
        model: that `torch_lms.chunked` has returned.
        optimizer: likewise.

    Raises:
        ChunkError: for another optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: ChunkedOptimizer) -> None:
        if not isinstance(optimizer, ChunkedOptimizer):
            raise ChunkError(
                f"expected the optimizer that torch_lms.chunked has returned, found {type(optimizer).__name__}; pass "
                "that one"
            )
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint saves, and writes to when it loads.

        What the optimizer has no state for yet gets what it would have: room to load it to. Groups name it.
        """
        states, without = self._optimizer.own_states(), self._optimizer.names_without_state()
        data = self._optimizer.data
        model = {}
        for name, value in (*self._model.named_parameters(remove_duplicate=False), *_saved_buffers(self._model)):
            number = data.numbers.get(value) if isinstance(value, nn.Parameter) else None
            model[name] = value.detach() if number is None else self._part_of(number, data.own_tensor(number))
        state = {}
        for number, values in states.items():
            state[data.tensors[number].name] = {
                key: self._part_of(number, value) if in_chunks else value for key, (value, in_chunks) in values.items()
            }
        groups = []
        for group in self._optimizer.param_groups:
            names = [data.tensors[data.numbers[one]].name for one in group["params"]]
            groups.append({**group, "params": names, WITHOUT_STATE: [name for name in names if name in without]})
        return {"model": model, "optimizer": {"state": state, "param_groups": groups}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what a checkpoint has written to this object's `state_dict`."""
        self._optimizer.take_loaded(state_dict["optimizer"])

    def _part_of(self, number: int, part: torch.Tensor) -> torch.Tensor:
        data = self._optimizer.data
        view = data.views[number]
        if view.numel() == 0:  # of which no rank has a piece
            return torch.empty_like(view, dtype=part.dtype, device=part.device)
        if not data.is_cut[data.chunk_of(number)]:
            return part.detach()
        return PiecesOfTensor(view, part.detach(), data.piece(number).begin)


def _saved_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    found = []
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found.append((f"{prefix}.{name}" if prefix else name, buffer))
    return found
