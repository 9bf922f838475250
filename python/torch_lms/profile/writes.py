"""What ops write to: told by their schemas, and found where a model runs as it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_lms._torch_compat import has_dispatch_modes, storage_key
from torch_lms.profile.preserving import contents_kept, storages_of
from torch_lms.profile.storages import dense_parts, tensors_in

__all__ = ["parameters_unwritten", "written_arguments"]


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of an op that it writes to."""
    if not func._schema.is_mutable:
        return []
    by_name = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    infos = {one.name: one.alias_info for one in func._schema.arguments}
    return [value for name, value in by_name.items() if infos.get(name) is not None and infos[name].is_write]


@contextmanager
def parameters_unwritten(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Puts back the parameters that a run of a model writes to; no others are copied.

    Yields:
        Those that have been written to, of which there are more as the model runs.
    """
    if not has_dispatch_modes():  # nobody sees the ops, so all may have been
        with contents_kept(model.parameters()):
            yield list(model.parameters())
        return
    with ExitStack() as stack:
        mode = _KeepingWritten(model.parameters(), stack)
        with mode:
            yield mode.written


class _KeepingWritten(TorchDispatchMode):
    """Copies parameters before the first op that writes to them."""

    def __init__(self, parameters: Iterable[nn.Parameter], stack: ExitStack) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: list[nn.Parameter] = []
        self._stack = stack
        self._left: dict[int, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            for key in storages_of([parameter]):
                self._left[key].append(parameter)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in(written_arguments(func, args, kwargs)):
            for part in dense_parts(tensor):
                found = self._left.pop(storage_key(part), [])
                if found:
                    self._stack.enter_context(contents_kept(found))
                    self.written += found
        return func(*args, **kwargs)
