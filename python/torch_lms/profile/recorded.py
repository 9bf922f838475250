"""A graph of one run: for models whose own forward cannot be traced, since Python looks at values in it.

The model runs once with its sample. What it calls of PyTorch becomes a node, PyTorch's own modules stay whole, and
Python's own steps are gone: loops are unrolled, and of each branch the graph has the side that was taken.

Note [Reads]: so the graph is right only while Python would see the same values again. Each value that Python read
(``if x.sum() > 0``, ``int(count)``, the length of ``nonzero()``) is computed in the graph as well and compared with
what it was; if it differs the graph stops with an error that names the line. Sizes that follow from those of the
arguments are fixed by their shapes, which a stage checks. What Python itself remembers, such as a count of calls, is
as it was, as in any traced graph, which is refused if the next call then does something else.

Source: the RFC's section on models that are not compatible with torch.fx, and its note on recording a program by
``__torch_function__``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import BackwardCFunction

from torch_lms._torch_compat import function_mode, named_parameters_with_ties
from torch_lms.errors import ProfileError
from torch_lms.profile.arguments import Sample
from torch_lms.profile.attributes import Attributes, Change, refuse_assigned
from torch_lms.profile.calls import BACKWARDS, LEAVING, READS, has_tensors, property_of, target_of
from torch_lms.profile.generators import PythonDraws
from torch_lms.profile.hooks import is_pytorchs, refuse_backward_hooks
from torch_lms.profile.modes import Modes
from torch_lms.profile.next_call import describe, refuse_other_call
from torch_lms.profile.ownership import set_module
from torch_lms.profile.preserving import preserved
from torch_lms.profile.source_lines import calling_line
from torch_lms.profile.writes import parameters_unwritten

__all__ = ["RecordingError", "check_read", "record_graph"]

# Their results' sizes depend on values.
_SIZED_BY_VALUES = frozenset(
    [
        *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "_unique2", "unique_dim"),
    ]
)


_CHOOSING = (torch.bool, torch.uint8, torch.int64, torch.int32)


class RecordingError(Exception):
    """One run could not be recorded."""


def check_read(found: Any, recorded: Any, line: str) -> None:
    """See Note [Reads].

    Raises:
        ProfileError: if Python would see another value than the graph was made with.
    """
    found = tuple(found) if isinstance(found, torch.Size) else found
    if found != recorded and not (found != found and recorded != recorded):  # one that is no number stays none
        raise ProfileError(
            f"expected {recorded!r} where the model reads a value in Python, as in the run that it was recorded in, "
            f"found {found!r}; keep to PyTorch's functions there, such as torch.where, or record it anew: {line}"
        )


def record_graph(model: nn.Module, sample: Sample) -> fx.Graph:
    """The graph of one run.

    Args:
        model: is run once, and left as it was; no other thread may run it meanwhile.
        sample: its tensors become placeholders; the graph is right for tensors of these shapes.

    Raises:
        RecordingError: if the model uses a tensor that no call known here has made or a function with a backward of its
            own, or hands a tensor out of PyTorch.
    """
    refuse_backward_hooks(model.named_modules())
    graph, changes = _record(model, sample)
    if changes:
        first, second = (
            describe(one, lambda name: attrgetter(name)(model)) for one in (graph, _record(model, sample, changes)[0])
        )
        refuse_other_call(first, second, changes)
    return graph


def _record(model: nn.Module, sample: Sample, before: Sequence[Change] = ()) -> tuple[fx.Graph, list[Change]]:
    """The graph of one run, after some changes, and what it changes; see `torch_lms.profile.next_call`."""
    with torch.enable_grad(), preserved(model, sample), parameters_unwritten(model):
        for change in before:
            change.make()
        attributes, draws = Attributes(model), PythonDraws()
        recording = _Recording(model, sample)
        with recording.modules_told(), function_mode(recording.call), recording.modes.watched():
            output = sample.call(model, sample.tensors)
        recording.end(output)
        replaced = attributes.put_back()
        draws.refuse()
    refuse_assigned(replaced & {name for name, _ in model.named_buffers()})
    return recording.graph, attributes.changed


class _Recording:
    def __init__(self, model: nn.Module, sample: Sample) -> None:
        self.graph = fx.Graph()
        self.modes = Modes()
        self._model = model
        self._path = [""]
        self._whole = 0  # modules under way that are one node
        self._nodes: dict[int, fx.Node] = {}
        self._kept: list[Any] = []  # so that no other tensor gets the number of one that has gone
        self._sized_by_values: set[fx.Node] = set()
        self._names: dict[int, str] = {}
        for name, parameter in named_parameters_with_ties(model):
            self._names.setdefault(id(parameter), name)
        self._names.update({id(buffer): name for name, buffer in model.named_buffers()})
        for name, tensor in zip(sample.names, sample.tensors, strict=True):
            self._bind(tensor, self.graph.placeholder(name))

    def end(self, output: Any) -> None:
        """Notes what the model returns."""
        self.graph.output(self._mapped(output))

    @contextmanager
    def modules_told(self) -> Iterator[None]:
        """Each module's forward says when it begins and ends."""
        told = []
        try:
            for path, module in self._model.named_modules():
                if path and "forward" not in vars(module):
                    vars(module)["forward"] = partial(self._run_module, path, module, module.forward)
                    told.append(module)
            yield
        finally:
            for module in told:
                del vars(module)["forward"]

    def _run_module(self, path: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._whole:
            return forward(*args, **kwargs)
        if not _stays_whole(module):
            self._path.append(path)
            try:
                return forward(*args, **kwargs)
            finally:
                self._path.pop()
        self.modes.check()
        given = self._mapped(args), self._mapped(kwargs)
        self._whole += 1
        try:
            result = forward(*args, **kwargs)
        finally:
            self._whole -= 1
        self._bind(result, self._add("call_module", path, *given))
        return result

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs what the model calls of PyTorch, and notes it."""
        if self._whole:
            return function(*args, **kwargs)
        name = getattr(function, "__name__", str(function))
        if name in LEAVING:
            raise RecordingError(f"{name} hands a tensor to what is no function of PyTorch, at {calling_line()}")
        if function in BACKWARDS:
            raise RecordingError(f"a backward, which no call alone can be, at {calling_line()}")
        if name == "register_hook":
            raise RecordingError(f"a hook changes a value's gradient, at {calling_line()}")
        if name != "_set_grad_enabled":
            self.modes.check()
        # Before it runs: what works in place is its result from then on.
        given = self._mapped(args), self._mapped(kwargs)
        if name == "__get__":
            given = (given[0][0], property_of(function)), {}
        result = function(*args, **kwargs)
        if name == "__iter__":
            result = list(result)
            self._bind(result, self._add("call_method", "unbind", (*given[0], 0), {}))
            return iter(result)
        if has_tensors(result):
            node = self._add(*target_of(function, name), *given)
            self._bind(result, node)
            self._note_sizes(node, name, args)
        elif name == "__setitem__":
            self._add("call_function", operator.setitem, *given)
        elif name in READS or (self._depends_on_values(given) and not _is_size_free(result)):
            read = self._add(*target_of(function, name), *given)
            recorded = tuple(result) if isinstance(result, torch.Size) else result
            self._add("call_function", check_read, (read, recorded, calling_line()), {})
        return result

    def _note_sizes(self, node: fx.Node, name: str, args: tuple[Any, ...]) -> None:
        keys = args[1:] if name in ("__getitem__", "repeat_interleave") else ()
        keys = keys[0] if keys and isinstance(keys[0], tuple) else keys
        chosen = any(isinstance(one, torch.Tensor) and one.dtype in _CHOOSING for one in keys)
        chosen = chosen or (name == "where" and len(args) == 1) or name in _SIZED_BY_VALUES
        if chosen or not self._sized_by_values.isdisjoint(node.all_input_nodes):
            self._sized_by_values.add(node)

    def _depends_on_values(self, given: tuple[Any, Any]) -> bool:
        found = False

        def look(value: Any) -> Any:
            nonlocal found
            found = found or (isinstance(value, fx.Node) and self._is_sized_by_values(value))
            return value

        fx.node.map_aggregate(given, look)
        return found

    def _is_sized_by_values(self, node: fx.Node) -> bool:
        """Elements of tuples follow the tuple."""
        return not self._sized_by_values.isdisjoint([node, *node.all_input_nodes])

    def _add(self, kind: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.create_node(kind, target, args, kwargs)
        set_module(node, str(target) if kind == "call_module" else self._path[-1])
        return node

    def _bind(self, value: Any, node: fx.Node) -> None:
        """A tensor's node, or that of a tuple of tensors with nodes for its elements."""
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
            self._kept.append(value)
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                if has_tensors(item):
                    self._bind(item, self._add("call_function", operator.getitem, (node, index), {}))
        elif isinstance(value, dict):
            for key, item in value.items():
                if has_tensors(item):
                    self._bind(item, self._add("call_function", operator.getitem, (node, key), {}))
        elif value is not None:
            raise RecordingError(f"{node.target} returns {type(value).__name__}, which the graph cannot take apart")

    def _mapped(self, value: Any) -> Any:
        """A value with nodes in place of its tensors."""
        return fx.node.map_aggregate(value, self._node_or_constant)

    def _node_or_constant(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            if value is None or isinstance(value, _CONSTANTS) or callable(value):
                return value
            raise RecordingError(f"expected numbers, text and tensors, found {type(value).__name__}")
        with torch._C.DisableTorchFunction():  # else the question is a node, where a module is about to run
            made_by = value.grad_fn
        if isinstance(made_by, BackwardCFunction):
            line = calling_line()
            raise RecordingError(f"a torch.autograd.Function, whose backward the graph would not have, before {line}")
        if id(value) not in self._nodes:
            name = self._names.get(id(value))
            if name is None:
                raise RecordingError(f"a tensor that was not made by a call of PyTorch's, used at {calling_line()}")
            node = self.graph.create_node("get_attr", name)
            set_module(node, name.rpartition(".")[0])
            self._bind(value, node)
        return self._nodes[id(value)]


_CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(Ellipsis), range),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size),
)


def _stays_whole(module: nn.Module) -> bool:
    """Whether a module is one node: PyTorch's own, without children, and without hooks, which are not its own code."""
    return is_pytorchs(module) and not any(module.children())


def _is_size_free(value: Any) -> bool:
    """Whether an answer has no number in it that a size could be."""
    return value is None or isinstance(value, (bool, str, torch.dtype, torch.device, torch.layout))
