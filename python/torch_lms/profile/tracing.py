"""From a model to a graph: as fine as can be had, and with notes on what stood in the way.

The ladder, from the finest on; each step down says which line of the user's code is why:

1. operator: torch.fx on the model's own forward; where that fails, `torch.export`, if this PyTorch has it.
2. opened: containers are opened and their children traced; a child that cannot be traced stays whole.
3. module: all that is left are the model's own children, whole.
4. recorded: a graph of one run, with the side that was taken of each branch, which it checks (``recorded``).
5. runtime: no graph; the ops are noted as they run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx, nn

from torch_lms._torch_compat import has_export, named_parameters_with_ties
from torch_lms.errors import ProfileError
from torch_lms.profile.arguments import Sample, bind_sample, check_model
from torch_lms.profile.attributes import Attributes
from torch_lms.profile.devices import devices_of
from torch_lms.profile.exported import Shapes, export_graph
from torch_lms.profile.hooks import has_backward_hooks
from torch_lms.profile.huggingface import as_in_training
from torch_lms.profile.names import check_name
from torch_lms.profile.recorded import record_graph
from torch_lms.profile.runtime import record_ops
from torch_lms.profile.source_lines import blame, first_line
from torch_lms.profile.symbolic import SymbolicError, trace_symbolically

__all__ = ["SOURCES", "TracedModel", "trace", "trace_again", "trace_sample"]

SOURCES = ("symbolic", "export", "opened", "recorded", "runtime")
_MAX_LEAVES = 64  # kinds of modules that are kept whole before the model is given up


@dataclass(frozen=True)
class TracedModel:
    """A model's graph.

    Attributes:
        graph_module: the graph with the model's own parameters under their own names; None at runtime level.
        level: ``operator``, ``opened``, ``module``, ``recorded`` or ``runtime``.
        model: what was traced.
        sample: what it was traced for.
        notes: what could not be traced and why.
        ops: at runtime level, the names of the ops as they ran, in order.
        shapes: of each argument the least and the largest size of each dimension that the graph is for; arguments that
            are not in it may have any shape with which the model runs.
        source: where the graph is from, one of `SOURCES`.
    """

    graph_module: fx.GraphModule | None
    level: str
    model: nn.Module
    sample: Sample
    notes: tuple[str, ...] = ()
    ops: tuple[str, ...] = field(default=())
    shapes: Shapes = field(default_factory=dict)
    source: str = "symbolic"

    @property
    def name(self) -> str:
        """The model's class."""
        return type(self.model).__name__

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """The graph's arguments from those of the model, as of `Sample.flatten`."""
        return self.sample.flatten(args, kwargs or {})


def trace(
    model: nn.Module,
    sample_args: Sequence[Any],
    sample_kwargs: Mapping[str, Any] | None = None,
    *,
    sources: Collection[str] = SOURCES,
) -> TracedModel:
    """Traces a model, and leaves it as it was; it is run only where no graph can be had.

    Args:
        model: on any device, the meta device included.
        sample_args: what it is called with, on any device. Tensors become arguments of the graph, all else is constant
            in it.
        sample_kwargs: the same by name.
        sources: where the graph may come from; without ``"runtime"`` there is a graph or an error.

    Raises:
        ProfileError: for arguments that the model does not take, or if no source is left; names the user's line.
    """
    check_model(model)
    unknown = sorted(set(sources) - set(SOURCES))
    if unknown:
        raise ProfileError(f"expected sources among {', '.join(SOURCES)}, found {unknown}; leave them out")
    return trace_sample(model, _beside(model, bind_sample(model, sample_args, sample_kwargs or {})), sources=sources)


def _beside(model: nn.Module, sample: Sample) -> Sample:
    """The sample where the model is, which may be profiled elsewhere: torch.export takes no two devices."""
    places = devices_of(model)
    if len(places) != 1 or any(tensor.is_meta for tensor in sample.tensors):
        return sample
    return sample.to(places.pop())


def trace_sample(model: nn.Module, sample: Sample, *, sources: Collection[str] = SOURCES) -> TracedModel:
    """The same for arguments that are bound already."""
    notes: list[str] = []
    with as_in_training(model, sample, notes):
        attributes = Attributes(model)
        try:
            for source in SOURCES:
                found: TracedModel | None = (
                    _ATTEMPTS[source](model, sample, notes, attributes) if source in sources else None
                )
                if found is not None:
                    return replace(found, source=source)
        finally:
            attributes.put_back()  # what a graph holds as constants is in its graph module as well
    raise ProfileError(
        f"expected a model that can be traced, found {type(model).__name__}, which cannot: {'; '.join(notes)}"
    )


def trace_again(traced: TracedModel) -> TracedModel:
    """Traces a model once more, from the same source, such as in another mode.

    Raises:
        ProfileError: if it cannot be traced so now.
    """
    return trace_sample(traced.model, _beside(traced.model, traced.sample), sources=(traced.source,))


def _from_symbols(model: nn.Module, sample: Sample, notes: list[str], attributes: Attributes) -> TracedModel | None:
    try:
        graph = trace_symbolically(model, sample, attributes)
        return TracedModel(_build(model, model, graph), "operator", model, sample, (*notes, *_kept_by_hooks(model)))
    except SymbolicError as failure:
        notes.append(_explain("torch.fx cannot trace", failure.path, failure.error))
    except ProfileError as error:  # for names that are others than those that were traced
        notes.append(_explain("torch.fx cannot trace", "", error))
    return None


def _from_export(model: nn.Module, sample: Sample, notes: list[str], _: Any) -> TracedModel | None:
    if not has_export():
        return None
    try:
        found = export_graph(model, sample)
        graph_module = _build(model, found.attributes, found.graph)
    except Exception as error:
        notes.append(_explain("torch.export cannot trace", "", error))
        return None
    return TracedModel(graph_module, "operator", model, sample, (*notes, *found.notes), shapes=found.shapes)


def _from_children(model: nn.Module, sample: Sample, notes: list[str], attributes: Attributes) -> TracedModel | None:
    """Keeps modules whole where tracing fails, until it does not; modules of one class share their fate."""
    leaves: set[str] = set()
    kept: list[str] = []
    for _ in range(_MAX_LEAVES):
        try:
            graph = trace_symbolically(model, sample, attributes, frozenset(leaves))
        except SymbolicError as failure:
            if not failure.path or failure.path in leaves:
                return None
            kind = type(model.get_submodule(failure.path))
            leaves |= {path for path, module in model.named_modules() if path and type(module) is kind}
            kept.append(_explain(f"kept whole: {kind.__name__}, first as", failure.path, failure.error))
            continue
        level = "module" if _is_coarse(graph) else "opened"
        kept += _kept_by_hooks(model)
        return TracedModel(_build(model, model, graph), level, model, sample, (*notes, *kept))
    return None


def _kept_by_hooks(model: nn.Module) -> list[str]:
    """A note on the modules that symbolic tracing has not opened, so that their hooks run."""
    hooked = [path for path, module in model.named_modules() if has_backward_hooks(module)]
    return [f"kept whole, since hooks run in their backward: {', '.join(hooked)}"] if hooked else []


def _from_one_run(model: nn.Module, sample: Sample, notes: list[str], _: Any) -> TracedModel | None:
    if not has_export():
        notes.append("not recorded: this PyTorch does not show all calls")
        return None
    if any(tensor.is_meta for tensor in (*sample.tensors, *model.parameters())):
        notes.append("not recorded: nothing can be read from tensors on the meta device")
        return None
    try:
        graph_module = _build(model, model, record_graph(model, sample))
    except Exception as error:
        notes.append(_explain("cannot record a run of", "", error))
        return None
    notes = [*notes, "recorded in one run: what Python reads from tensors is checked to be the same"]
    shapes: Shapes = {
        name: tuple((size, size) for size in tensor.shape)
        for name, tensor in zip(sample.names, sample.tensors, strict=True)
    }
    return TracedModel(graph_module, "recorded", model, sample, tuple(notes), shapes=shapes)


def _from_runtime(model: nn.Module, sample: Sample, notes: list[str], _: Any) -> TracedModel | None:
    ops = tuple(op.name for op in record_ops(model, sample))
    notes = [*notes, "no graph: the ops are those of one run with the sample"]
    return TracedModel(None, "runtime", model, sample, tuple(notes), ops)


_ATTEMPTS: Mapping[str, Any] = {
    "symbolic": _from_symbols,
    "export": _from_export,
    "opened": _from_children,
    "recorded": _from_one_run,
    "runtime": _from_runtime,
}


def _is_coarse(graph: fx.Graph) -> bool:
    """Whether nothing was opened: all that is computed are whole modules."""
    return all(node.op == "call_module" for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output"))


def _build(model: nn.Module, root: nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """A graph module that holds the model's own tensors, each as persistent as in the model."""
    _use_first_names(model, graph)
    for node in graph.nodes:
        check_name(node.op, node.target)
    graph.lint()
    graph_module = fx.GraphModule(root, graph, type(model).__name__)
    modes = {path: module.training for path, module in model.named_modules(remove_duplicate=False)}
    for path, module in graph_module.named_modules():
        module.training = modes.get(path, model.training)
    persistent = {name for name, _ in model.named_buffers() if name in model.state_dict(keep_vars=True)}
    for prefix, module in graph_module.named_modules():
        for name in module._buffers:
            if (f"{prefix}.{name}" if prefix else name) not in persistent:
                module._non_persistent_buffers_set.add(name)
    return graph_module


def _use_first_names(model: nn.Module, graph: fx.Graph) -> None:
    """Tied parameters come under their first name."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(parameter), name) for name, parameter in named_parameters_with_ties(model)}
    for node in graph.nodes:
        if node.op == "get_attr":
            node.target = names.get(str(node.target), node.target)


def _explain(what: str, path: str, error: Exception) -> str:
    place = f" at {blame(error)}" if blame(error) else ""
    return f"{what} {repr(path) if path else 'the model'}{place}: {first_line(error)}"
