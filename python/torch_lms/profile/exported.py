"""The graph that `torch.export` gives, as a plain one: with the model's own names, structure of outputs and modules."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from torch_lms._torch_compat import named_parameters_with_ties
from torch_lms.errors import ProfileError
from torch_lms.profile.arguments import Sample
from torch_lms.profile.attributes import Attributes, Change, plain_tensors, refuse_assigned
from torch_lms.profile.generators import PythonDraws, generators_kept
from torch_lms.profile.hooks import refuse_backward_hooks
from torch_lms.profile.mappings import is_own_mapping
from torch_lms.profile.modes import functions_refused
from torch_lms.profile.next_call import describe, refuse_other_call
from torch_lms.profile.ownership import set_module
from torch_lms.profile.preserving import contents_kept
from torch_lms.profile.regions import Region, is_assertion, is_region

__all__ = ["Range", "Shapes", "export_graph"]

_PREFIX = "model."
_TRANSFORMS = "torch._functorch."  # such as torch.func.vmap
Range = tuple[int, float]  # the least and the largest size that a graph is for
Shapes = Mapping[str, tuple[Range, ...]]


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in the structure of the outputs."""

    index: int


class _Entry(nn.Module):
    """Takes and gives tensors only; the model's names start with ``model.``."""

    def __init__(self, model: nn.Module, sample: Sample) -> None:
        super().__init__()
        self.train(model.training)
        self.model = model
        self.sample = sample
        self.outputs = _Outputs()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the model and notes the structure of what it returns."""
        found: list[torch.Tensor] = []
        attributes, draws = Attributes(self.model), PythonDraws()
        with functions_refused():
            self.outputs.structure = self.outputs.flatten(self.sample.call(self.model, tensors), found)
        draws.refuse()
        self.outputs.assigned = attributes.put_back()
        self.outputs.changed = attributes.changed
        return tuple(found)


class _Outputs:
    """The structure of what a model returns. No attribute of the module: export would put those back."""

    def __init__(self) -> None:
        self.structure: Any = None
        self.assigned: frozenset[str] = frozenset()
        self.changed: list[Change] = []
        self.unknown: set[str] = set()

    def flatten(self, value: Any, found: list[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            found.append(value)
            return _Slot(len(found) - 1)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.flatten(item, found) for item in value))
        if isinstance(value, list | tuple):
            return type(value)(self.flatten(item, found) for item in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            items = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            given = {name: item for name, item in items.items() if item is not None}
            return _Made(type(value), {name: self.flatten(item, found) for name, item in given.items()})
        if isinstance(value, Mapping):
            items = {name: self.flatten(item, found) for name, item in value.items()}
            return _Made(type(value), items) if is_own_mapping(value) else items
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        self.unknown.add(type(value).__name__)
        return None


@dataclasses.dataclass(frozen=True)
class _Made:
    """Stands for an object that is made of the outputs."""

    type: type
    fields: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Exported:
    """A graph as `torch.export` made it.

    Attributes:
        attributes: what the graph's attributes and modules stand for.
        graph: with the model's own names.
        notes: what is not as in the model.
        shapes: of each argument the sizes, by dimension, that the graph is for.
    """

    attributes: dict[str, Any]
    graph: fx.Graph
    notes: tuple[str, ...]
    shapes: Shapes


def export_graph(model: nn.Module, sample: Sample) -> Exported:
    """Exports a model for training; it is not run, and not changed.

    Sizes stay open where the model's code lets them.
    """
    refuse_backward_hooks(model.named_modules())
    made, changes = _export_once(model, sample)
    if changes:
        again, _ = _export_once(model, sample, changes)
        first, second = (describe(one.graph, one.attributes.__getitem__) for one in (made, again))
        refuse_other_call(first, second, changes)
    return made


def _export_once(model: nn.Module, sample: Sample, before: Sequence[Change] = ()) -> tuple[Exported, list[Change]]:
    """A graph, after some changes, and what the forward changes; see `torch_lms.profile.next_call`."""
    entry = _Entry(model, sample)
    attributes = Attributes(model)
    try:
        for change in before:
            change.make()
        with generators_kept(), contents_kept(tensor for tensor in plain_tensors(model).values() if tensor.is_leaf):
            program = _export(entry, _distinct(sample.tensors))
    finally:
        attributes.put_back()
    rebuilt = _Rebuilder(program, model, sample)
    for node in program.graph.nodes:
        rebuilt.copy(node)
    rebuilt.output(entry.outputs.structure)
    buffers = {name for name, _ in model.named_buffers()}
    refuse_assigned(entry.outputs.assigned & (buffers | rebuilt.read_plain))
    shapes = rebuilt.shapes()
    fixed = {name: [low if low == high else "any" for low, high in sizes] for name, sizes in shapes.items()}
    notes = [f"the graph is for {name} of shape {sizes}" for name, sizes in fixed.items() if set(sizes) != {"any"}]
    if entry.outputs.unknown:
        notes.append(f"left out of the outputs, since no graph can hold it: {', '.join(sorted(entry.outputs.unknown))}")
    return Exported(rebuilt.attributes, rebuilt.graph, tuple(notes), shapes), entry.outputs.changed


def _export(entry: _Entry, tensors: tuple[torch.Tensor, ...]) -> Any:
    """With open sizes, if this PyTorch and the model can; else for the sample's shapes."""
    auto = getattr(getattr(torch.export, "Dim", None), "AUTO", None)
    with _silence():
        if auto is not None:
            sizes = {"tensors": tuple(dict.fromkeys(range(tensor.dim()), auto) for tensor in tensors)}
            with contextlib.suppress(Exception):
                return torch.export.export(entry, tensors, strict=False, dynamic_shapes=sizes)
            entry.outputs = _Outputs()
        return torch.export.export(entry, tensors, strict=False)


def _distinct(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Copies of those that are given twice: export tells arguments apart by their identity."""
    seen: set[int] = set()
    found = []
    for tensor in tensors:
        found.append(tensor.detach().clone().requires_grad_(tensor.requires_grad) if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return tuple(found)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps back what export logs and prints where it fails; the error says the same."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)


class _Rebuilder:
    """Writes the exported program anew."""

    def __init__(self, program: Any, model: nn.Module, sample: Sample) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self._program = program
        self._own: dict[fx.Node, fx.Node] = {}
        self._results: tuple[fx.Node, ...] = ()
        self.read_plain: set[str] = set()
        self._first: dict[int, str] = {}
        for name, parameter in named_parameters_with_ties(model):
            self._first.setdefault(id(parameter), name)
        self._model = model
        inputs = list(program.graph_signature.input_specs)
        names = iter(sample.names)
        self._placeholders = {spec.arg.name: (spec, next(names) if spec.target is None else "") for spec in inputs}
        for spec, name in self._placeholders.values():  # all of them, in order, also where they are not used
            if name:
                self._argument(spec.arg.name, name)

    def _argument(self, exported: str, name: str) -> None:
        source = next(node for node in self._program.graph.nodes if node.name == exported)
        self._own[source] = self.graph.placeholder(name)
        set_module(self._own[source], "")

    def copy(self, node: fx.Node) -> None:
        """Copies a node, or notes how it is read."""
        if node.op == "output":
            self._results = tuple(node.args[0])  # type: ignore[arg-type]
        if node.op != "call_function" or is_assertion(node):
            return
        target = node.target
        if str(getattr(target, "__module__", "")).startswith(_TRANSFORMS):
            raise ProfileError(
                "expected calls that each stand alone, found a transform of torch.func, which is open from one call to "
                "another; put what calls it into a module of its own"
            )
        if is_region(node):
            made = self._region(node)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._read)
            made = self.graph.create_node("call_function", target, args, kwargs, node.name)
        set_module(made, _exported_module(node))
        made.meta["stack_trace"] = node.meta.get("stack_trace")
        self._own[node] = made

    def shapes(self) -> Shapes:
        """The sizes of the arguments that the program is for."""
        known = self._program.range_constraints

        def sizes(name: str) -> tuple[Range, ...]:
            source = next(node for node in self._program.graph.nodes if node.name == name)
            return tuple(_range(size, known) for size in source.meta["val"].shape)

        return {name: sizes(exported) for exported, (_, name) in self._placeholders.items() if name}

    def _read(self, node: fx.Node) -> fx.Node:
        """The new graph's node for one of the old's; attributes get their node where they are read first."""
        if node not in self._own:
            target, value = self._value_of(node)
            self.attributes[target] = value
            self._own[node] = self.graph.create_node("get_attr", target)
            set_module(self._own[node], target.rpartition(".")[0])
        return self._own[node]

    def _value_of(self, node: fx.Node) -> tuple[str, Any]:
        if node.op == "get_attr":
            return str(node.target), getattr(self._program.graph_module, str(node.target))
        spec, _ = self._placeholders[node.name]
        name = str(spec.target)
        if not self._is_attribute(name):  # a constant that the model made while it was traced
            return name.replace(".", "_"), self._program.constants[name]
        name = name[len(_PREFIX) :]
        value = attrgetter(name)(self._model)
        self.read_plain.add(name)
        return self._first.get(id(value), name), value

    def _is_attribute(self, name: str) -> bool:
        try:
            return name.startswith(_PREFIX) and attrgetter(name[len(_PREFIX) :])(self._model) is not None
        except AttributeError:
            return False

    def _region(self, node: fx.Node) -> fx.Node:
        """A call of a module for what ran in a mode of its own."""
        region, given = Region.of(node, self._program.graph_module)
        name = f"region_{sum(isinstance(value, Region) for value in self.attributes.values())}"
        self.attributes[name] = region
        return self.graph.create_node("call_module", name, fx.node.map_arg(given, self._read))

    def output(self, structure: Any) -> None:
        """Ends the graph with the model's own structure of outputs."""

        def build(part: Any) -> Any:
            if isinstance(part, _Slot):
                return self._read(self._results[part.index])
            if isinstance(part, _Made):
                fields = {name: build(item) for name, item in part.fields.items()}
                made = self.graph.create_node("call_function", part.type, (), fields)
                set_module(made, "")
                return made
            if isinstance(part, tuple) and hasattr(part, "_fields"):
                return type(part)(*(build(item) for item in part))
            if isinstance(part, list | tuple):
                return type(part)(build(item) for item in part)
            return {name: build(item) for name, item in part.items()} if isinstance(part, dict) else part

        set_module(self.graph.output(build(structure)), "")


def _range(size: Any, known: Mapping[Any, Any]) -> Range:
    if isinstance(size, int):
        return size, size
    expression = size.node.expr
    if expression.is_number:  # open at first, until the model's code fixed it
        return int(expression), int(expression)
    bounds = known.get(expression)
    if bounds is None:  # made of other sizes
        return 0, float("inf")
    upper = float(bounds.upper)
    return int(bounds.lower), upper if upper < 2**40 else float("inf")


def _exported_module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return path[len(_PREFIX) :] if path.startswith(_PREFIX) else ""
