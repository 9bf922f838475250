"""What cannot be had as a graph: ops of PyTorch's Python interface, as they run, and where their inputs come from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_lms._torch_compat import function_mode, named_parameters_with_ties, storage_key
from torch_lms.errors import ProfileError
from torch_lms.profile.arguments import Sample
from torch_lms.profile.node_facts import NodeFacts, Watcher
from torch_lms.profile.preserving import preserved, run_or_explain
from torch_lms.profile.storages import dense_parts, tensors_in
from torch_lms.profile.writes import parameters_unwritten

__all__ = ["OpRecorder", "record_ops"]

# Reads of attributes, and questions that no device answers.
_FREE = frozenset(
    {"__get__", "__set__", "size", "dim", "stride", "is_floating_point", "is_complex", "numel", "__len__", "__repr__"}
)


class OpRecorder:
    """Runs a model under a watcher, op by op.

    Args:
        model: what runs.
        sample: its tensors are the first nodes.
        watcher: sees each op under its name.
        expected: the ops of a run before this one; others are an error.

    Attributes:
        ops: what has run, in order.
    """

    def __init__(
        self, model: nn.Module, sample: Sample, watcher: Watcher, expected: list[NodeFacts] | None = None
    ) -> None:
        self.ops: list[NodeFacts] = []
        self._model = model
        self._sample = sample
        self._watcher = watcher
        self._expected = expected
        self._modules = {module: name for name, module in model.named_modules()}
        self._path: list[str] = [""]
        self._counts: dict[str, int] = {}
        self._makers: dict[int, tuple[Any, str]] = {}
        self._writers: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        for name, parameter in named_parameters_with_ties(model):
            self._parameters.setdefault(id(parameter), name)
        self._buffers = {id(buffer): name for name, buffer in model.named_buffers()}

    def run(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Runs the model once.

        Raises:
            ProfileError: if it runs other ops than before.
        """
        for name, tensor in zip(self._sample.names, tensors, strict=True):
            self._add(NodeFacts(name=name, op="placeholder", target=name))
            self._note_output(name, self._watcher.watch(name, partial(_same, tensor)))
        with self._hooks(), function_mode(self._call):
            output = self._sample.call(self._model, tensors)
        made = tuple(dict.fromkeys(maker for maker in map(self._maker, tensors_in(output)) if maker))
        self._add(NodeFacts(name="output", op="output", target="output", inputs=made))
        if self._expected is not None and len(self.ops) != len(self._expected):
            self._differs(self.ops[-1])
        return output

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", str(function))
        if name in _FREE:
            return function(*args, **kwargs)
        used = list(tensors_in((args, kwargs)))
        facts = self._facts(function, name.strip("_") or "op", used)
        value: Any = None
        done = False

        def run() -> Any:
            nonlocal value, done
            value, done = function(*args, **kwargs), True
            return value if isinstance(value, (torch.Tensor, tuple, list, dict)) else None

        self._watcher.watch(facts.name, run)
        assert done
        self._add(facts)
        self._note_output(facts.name, value)
        if "out" in kwargs or (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
            for tensor in used[:1]:
                self._note_output(facts.name, tensor)
        return value

    def _facts(self, function: Callable[..., Any], name: str, used: list[torch.Tensor]) -> NodeFacts:
        count = self._counts[name] = self._counts.get(name, -1) + 1
        own = f"{name}_{count}" if count else name
        module = getattr(function, "__module__", None) or ""
        return NodeFacts(
            name=own if own not in self._sample.names else f"{own}_op",
            op="call_function",
            target=f"{module}.{getattr(function, '__name__', name)}".lstrip("."),
            inputs=tuple(dict.fromkeys(maker for maker in map(self._maker, used) if maker)),
            module=self._path[-1],
            parameters=self._own(used, self._parameters),
            buffers=self._own(used, self._buffers),
        )

    def _own(self, used: list[torch.Tensor], names: dict[int, str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(names[id(tensor)] for tensor in used if id(tensor) in names))

    def _add(self, facts: NodeFacts) -> None:
        place = len(self.ops)
        self.ops.append(facts)
        if self._expected is not None and (place >= len(self._expected) or self._expected[place].name != facts.name):
            self._differs(facts)

    def _differs(self, facts: NodeFacts) -> None:
        raise ProfileError(
            f"expected the same ops in each run, found {facts.name!r} in module {facts.module!r} as op "
            f"{len(self.ops)}, which differs from the first run; make the model's control flow repeat itself"
        )

    def _maker(self, tensor: torch.Tensor) -> str | None:
        """The op that made a tensor; one that was changed through another view counts as made by the writer."""
        ref, name = self._makers.get(id(tensor), (None, None))
        if ref is not None and ref() is tensor:
            return name
        return next((self._writers.get(storage_key(part)) for part in dense_parts(tensor)), None)

    def _note_output(self, name: str, value: Any) -> None:
        for tensor in tensors_in(value):
            self._makers[id(tensor)] = (weakref.ref(tensor), name)
            for part in dense_parts(tensor):
                self._writers[storage_key(part)] = name

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Follows which module runs."""

        def enter(module: nn.Module, _args: Any) -> None:
            self._path.append(self._modules[module])

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._path.pop()

        handles = []
        for module in self._modules:
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _NoWatcher:
    def watch(self, _name: str, run: Callable[[], Any]) -> Any:
        return run()


def record_ops(model: nn.Module, sample: Sample) -> list[NodeFacts]:
    """The ops of one run, which leaves the model and random numbers as they were.

    It keeps nothing for a backward, unless the forward only runs with gradients, as one that itself runs a backward.
    """
    with suppress(ProfileError), torch.no_grad():
        return _record_ops(model, sample)
    with torch.enable_grad():
        return _record_ops(model, sample)


def _record_ops(model: nn.Module, sample: Sample) -> list[NodeFacts]:
    recorder = OpRecorder(model, sample, _NoWatcher())
    with preserved(model, sample), parameters_unwritten(model):
        run_or_explain(model, sample, lambda: recorder.run(tuple(tensor.detach() for tensor in sample.tensors)))
    return recorder.ops
