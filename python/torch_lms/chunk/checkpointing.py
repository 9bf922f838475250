"""State dicts of models in chunks: those of the plain model, in 32 bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_lms.chunk.model_data import ModelData
from torch_lms.chunk.occupancy import Occupancy
from torch_lms.errors import ChunkError

__all__ = ["StateDictHooks"]


class StateDictHooks:
    """Has `state_dict` return masters, and `load_state_dict` fill them: of the model, and of each of its modules.

    So a checkpoint is the plain model's, loses no bit, and can be loaded into a model whose chunks are others, or that
    has none. Parameters that no optimizer updates are saved as they are. Copies of a model have no chunks: the copied
    hooks do nothing.
    """

    def __init__(self) -> None:
        self._data: ModelData | None = None

    def __reduce__(self) -> tuple[type[StateDictHooks], tuple[()]]:
        """For copies."""
        return StateDictHooks, ()

    def attach(self, model: nn.Module, data: ModelData, occupancy: Occupancy) -> None:
        """Begins to do so."""
        self._data = data
        self._occupancy = occupancy
        self._given: dict[nn.Module, dict[int, torch.Tensor]] = {}
        for module in model.modules():
            module.register_state_dict_pre_hook(self._before_saving)
            module.register_state_dict_post_hook(partial(self._masters_instead))  # which gets an attribute
            module.register_load_state_dict_pre_hook(self._before_loading)
            module.register_load_state_dict_post_hook(self._after_loading)

    def _updated(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, int]]:
        """The module's own parameters that have masters, whatever their names are by now."""
        if self._data is not None:
            for name, one in module.named_parameters(recurse=False, remove_duplicate=False):
                number = self._data.numbers.get(one)
                if number is not None and self._data.tensors[number].group is not None:
                    yield name, one, number

    def _before_saving(self, module: nn.Module, *_: Any) -> None:
        numbers = [number for _, _, number in self._updated(module)]
        if numbers:
            self._occupancy.give_back(numbers)
            for number in numbers:
                self._occupancy.note_written(number)

    def _masters_instead(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        for name, parameter, number in self._updated(module):
            if state_dict.get(prefix + name, parameter) is not parameter and self._data is not None:  # not keep_vars
                state_dict[prefix + name] = self._data.master(number)

    def _before_loading(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
    ) -> None:
        found = list(self._updated(module))
        if not found:
            return
        if local_metadata.get("assign_to_params_buffers", False):
            raise ChunkError(
                "expected load_state_dict to copy into parameters, found assign=True; leave it out: "
                "parameters lie in chunks"
            )
        self._before_saving(module)
        self._given[module] = {
            number: value
            for name, one, number in found
            if isinstance(value := state_dict.get(prefix + name), torch.Tensor) and value.shape == one.shape
        }

    @torch.no_grad()
    def _after_loading(self, module: nn.Module, _: Any) -> None:
        """What has been loaded is known to 16 bits from the parameter, and better from what was given."""
        given = self._given.pop(module, {}) if self._data is not None else {}
        for _, one, number in self._updated(module):
            self._occupancy.note_written(number)
            if number in given and self._data is not None:
                master = self._data.master(number)
                wide = given[number].to(master.device, torch.float32)
                master.copy_(torch.where(wide.to(one.dtype) == one.to(master.device), wide, master))
