"""State dicts of models in chunks: those of the plain model, in 32 bits."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
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
        self._given: dict[nn.Module, dict[int, torch.Tensor]] = {}

    def __reduce__(self) -> tuple[type[StateDictHooks], tuple[()]]:
        """For copies."""
        return StateDictHooks, ()

    def attach(self, model: nn.Module, data: ModelData, occupancy: Occupancy) -> None:
        """Begins to do so."""
        self._data = data
        self._occupancy = occupancy
        times = Counter(data.numbers.get(one) for _, one in model.named_parameters(remove_duplicate=False))
        self._tied = {number for number, count in times.items() if count > 1}
        self._copies_of_tied: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        for module in model.modules():
            module.register_state_dict_pre_hook(self._before_saving)
            module.register_state_dict_post_hook(partial(self._masters_instead))  # which gets an attribute
            module.register_load_state_dict_pre_hook(self._before_loading)
            module.register_load_state_dict_post_hook(self._after_loading)

    def _in_chunks(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, int]]:
        """The module's own parameters, whatever their names are by now."""
        if self._data is not None:
            for name, one in module.named_parameters(recurse=False, remove_duplicate=False):
                if (number := self._data.numbers.get(one)) is not None:
                    yield name, one, number

    def _before_saving(self, module: nn.Module, *_: Any) -> None:
        numbers = [number for _, _, number in self._in_chunks(module)]
        if numbers:
            self._occupancy.give_back(numbers)
            self._note_written(numbers)

    def _note_written(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self._data is not None and self._data.tensors[number].group is not None:
                self._occupancy.note_written(number)

    def _masters_instead(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        """In memory of their own: who saves tensors takes those of one storage for tied ones."""
        for name, parameter, number in self._in_chunks(module):
            if state_dict.get(prefix + name, parameter) is not parameter:  # not keep_vars
                state_dict[prefix + name] = self._copy_for(state_dict, number)

    def _copy_for(self, state_dict: dict[str, Any], number: int) -> torch.Tensor:
        """One for all names of a tensor in a state dict."""
        assert self._data is not None
        copy = self._copies_of_tied.get(number)
        if copy is not None and any(value is copy for value in state_dict.values()):
            return copy
        wide = self._data.tensors[number].group is not None
        whole = self._data.whole_master(number) if wide else self._data.whole_parameter(number)
        copy = whole.detach().clone()
        if number in self._tied:
            self._copies_of_tied[number] = copy
        return copy

    def _before_loading(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
    ) -> None:
        given = {
            number: value
            for name, one, number in self._in_chunks(module)
            if isinstance(value := state_dict.get(prefix + name), torch.Tensor) and value.shape == one.shape
        }
        if given and local_metadata.get("assign_to_params_buffers", False):
            raise ChunkError(
                "expected load_state_dict to copy into parameters, found assign=True; leave it out: "
                "parameters lie in chunks"
            )
        if given:
            self._before_saving(module)
            self._occupancy.open(given)
            self._given[module] = given

    @torch.no_grad()
    def _after_loading(self, module: nn.Module, _: Any) -> None:
        """What has been loaded is known to 16 bits from the parameter, and better from what was given."""
        given = self._given.pop(module, {})
        if not given or self._data is None:
            return
        self._note_written(given)
        for number, value in given.items():
            if self._data.masters[number] is not None:
                master = self._data.master(number)
                wide = self._data.own_part(number, value.float()).to(master.device)
                here = self._data.own_part(number, self._data.tensors[number].parameter.detach()).to(master.device)
                master.copy_(torch.where(wide.to(here.dtype) == here, wide, master))
        self._occupancy.close(given)
        self._data.unfilled.difference_update(given)
