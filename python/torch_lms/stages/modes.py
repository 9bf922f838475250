"""Training and evaluation: the code of stages reads the mode from their modules, where a trace wrote it down.

Note [Modes]: a trace says what was so while it was made: ``dropout(x, 0.1, True)``. In the code of a stage this is
``dropout(x, 0.1, self.layer.training)``, of the module whose code calls the function, if that module was in the same
mode, and, where it is known, is told another in the other mode. So in a graph of torch.export a ``dropout`` that the
model wants outside of training too does nothing there. A region, whose code is made already, is run under a function
mode that says the same.

What the code does not say is refused when the stage runs: in training, where the trace was made in evaluation, how
batch norms update their statistics, and the dropout of an attention that had none; and in the other mode all modules
that then compute otherwise, as far as torch.fx finds it out (`OtherMode`).
"""

from __future__ import annotations

import inspect
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from torch import fx, nn

from torch_lms._torch_compat import function_mode
from torch_lms.errors import PartitionError, ProfileError
from torch_lms.profile.graph_code import Generated
from torch_lms.profile.ownership import module_of
from torch_lms.profile.tracing import trace_sample

if TYPE_CHECKING:
    from torch_lms.profile.tracing import TracedModel

__all__ = ["ModeWriter", "OtherMode", "RegionInMode", "refuse_mode"]

_FLAG = "training"
_FLAGS = (_FLAG, "train", "use_input_stats")
_RATE = "dropout_p"
_STATISTICS = "running_mean"
_CONSTANT = re.compile(r"^_tensor_constant\d+$")
# Arguments of builtin functions, which have no signature.
_BUILTIN = {
    **{
        name: ("input", "p", "train")
        for kind in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
        for name in (kind, f"{kind}_")
    },
    "batch_norm": ("input", "weight", "bias", _STATISTICS, "running_var", _FLAG),
    "instance_norm": ("input", "weight", "bias", _STATISTICS, "running_var", "use_input_stats"),
    "rrelu": ("input", "lower", "upper", _FLAG),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", _RATE),
}


@cache
def _argument_names(function: Any) -> tuple[str, ...]:
    if isinstance(function, type):
        return ()
    schema = getattr(function, "_schema", None)
    if schema is not None:
        return tuple(argument.name for argument in schema.arguments)
    known = _BUILTIN.get(getattr(function, "__name__", ""), ())
    try:
        return tuple(inspect.signature(function).parameters) if inspect.isroutine(function) else known
    except (TypeError, ValueError):
        return known


def _mode_name(function: Any) -> str | None:
    """The argument that tells a function its mode; of attention that is how much it drops."""
    names = _argument_names(function)
    return next((name for name in (*_FLAGS, _RATE) if name in names), None)


def _given(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """What an argument is given; None where that is its default, but of operators, whose graphs leave defaults out."""
    place = _argument_names(function).index(name) if name in _argument_names(function) else len(args)
    if place < len(args):
        return args[place]
    schema = getattr(function, "_schema", None)
    return kwargs.get(name, None if schema is None else schema.arguments[place].default_value)


def _with(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another value of one that is given."""
    place = _argument_names(function).index(name)
    if place < len(args):
        return (*args[:place], value, *args[place + 1 :]), dict(kwargs)
    return args, {**kwargs, name: value}


def _knows_mode(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call says a mode: without running statistics, a norm uses the batch's own in each."""
    name = _mode_name(function)
    if name is None or _given(function, args, kwargs, name) is None:
        return False
    return _STATISTICS not in _argument_names(function) or _given(function, args, kwargs, _STATISTICS) is not None


class ModeWriter:
    """Has a stage's graph read the modes that its trace wrote down; see Note [Modes].

    Args:
        graph: of a stage.
        modes: whether each module of the model was training, by path, the model itself under the empty one.
        other: what is known of the other mode.
        own_name: how the stage calls an attribute of the model.

    Attributes:
        fixed: paths of modules whose functions the graph has for evaluation alone.
        paths: of all modules whose mode the stage has to know.
    """

    def __init__(
        self, graph: fx.Graph, modes: Mapping[str, bool], other: OtherMode, own_name: Callable[[str], str]
    ) -> None:
        self._graph, self._modes, self._other, self._own_name = graph, modes, other, own_name
        self._flags: dict[str, fx.Node] = {}
        self.fixed: set[str] = set()
        self._first = next(node for node in graph.nodes if node.op != "placeholder")
        for node in [node for node in graph.nodes if node.op == "call_function"]:
            self._count(node)
            if _knows_mode(node.target, node.args, node.kwargs):
                self._write(node, module_of(node) if module_of(node) in modes else "")

    @property
    def paths(self) -> frozenset[str]:
        """See the class."""
        return frozenset(self._flags) | self.fixed

    def _flag(self, path: str) -> fx.Node:
        """The node that reads a module's mode, before all that computes: segments stay in one piece."""
        if path not in self._flags:
            with self._graph.inserting_before(self._first):
                name = self._own_name(f"{path}.{_FLAG}" if path else _FLAG)
                self._flags[path] = self._graph.create_node("get_attr", name)
        return self._flags[path]

    def _count(self, node: fx.Node) -> None:
        """A batch norm counts its batches in training."""
        source = node.args[0] if len(node.args) > 1 else None
        if not isinstance(source, fx.Node) or source.op != "get_attr" or node.args[1] != 1:
            return
        path, _, name = str(source.target).rpartition(".")
        path = path.removeprefix("own.")
        if name == "num_batches_tracked" and self._modes.get(path):
            node.args = (source, self._flag(path), *node.args[2:])

    def _write(self, node: fx.Node, path: str) -> None:
        name = _mode_name(node.target)
        assert name is not None
        value, training = _told(node), self._modes[path]
        other = self._other.told.get(node.name)
        if value == other or (name != _RATE and value is not training):
            return  # the same in both modes
        if name == _RATE:
            rate, rest = (value, other) if training else (other, value)
            if rest not in (None, 0) or rate == 0:
                return
            if rate is None:
                self.fixed |= {path} if value == 0 else set()
                return
            with self._graph.inserting_before(self._first):
                made = self._graph.create_node("call_function", operator.mul, (rate, self._flag(path)))
        elif not training and _STATISTICS in _argument_names(node.target):
            self.fixed.add(path)
            return
        else:
            made = self._flag(path)
        node.args, node.kwargs = _with(node.target, node.args, node.kwargs, name, made)


@dataclass(frozen=True)
class OtherMode:
    """How a graph differs from that of the other mode; nothing is known where it was not looked for.

    Attributes:
        elsewhere: paths of modules whose code computes otherwise, such as behind ``if self.training``.
        told: what calls are told of the mode there, by the names of their nodes.
    """

    elsewhere: frozenset[str] = frozenset()
    told: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, traced: TracedModel) -> OtherMode:
        """Looks at a graph that was made of the model's own forward, which is quickly done again; not at others."""
        other = _traced_in_other_mode(traced)
        if traced.graph_module is None or other is None:
            return cls()
        one, two = traced.graph_module.graph, other.graph
        if _lines(one) == _lines(two):
            return cls(told={node.name: _told(twin) for node, twin in zip(one.nodes, two.nodes, strict=True)})
        parts, others = _lines_by_module(one), _lines_by_module(two)
        elsewhere = {path for path in {**parts, **others} if parts.get(path) != others.get(path)}
        return cls(elsewhere=frozenset(elsewhere or [""]))


def _traced_in_other_mode(traced: TracedModel) -> fx.GraphModule | None:
    if traced.graph_module is None or traced.level != "operator" or traced.shapes:
        return None
    model = traced.model
    modes, names = [(module, module.training) for module in model.modules()], set(vars(model))
    other = not model.training
    try:
        for module, _ in modes:
            module.training = other
        return trace_sample(model, traced.sample, sources=("symbolic",)).graph_module
    except ProfileError:
        return None
    finally:
        for module, mode in modes:
            module.training = mode
        for name in set(vars(model)) - names:  # constants of the other graph
            delattr(model, name)


def _told(node: fx.Node) -> Any:
    """What a call is told of the mode; None where it is not."""
    name = _mode_name(node.target) if node.op == "call_function" else None
    return None if name is None else _given(node.target, node.args, node.kwargs, name)


def _lines(graph: fx.Graph) -> list[tuple[str, ...]]:
    places = {node: str(place) for place, node in enumerate(graph.nodes)}
    return [_line(node, places.__getitem__) for node in graph.nodes]


def _line(node: fx.Node, shown: Callable[[fx.Node], str]) -> tuple[str, ...]:
    """What a node does, whatever the mode, and whatever the constants are called."""
    target = _CONSTANT.sub("constant", str(node.target)) if node.op == "get_attr" else str(node.target)
    args, kwargs = node.args, dict(node.kwargs)
    if _told(node) is not None:
        args, kwargs = _with(node.target, args, kwargs, _mode_name(node.target) or "", _FLAG)
    args, kwargs = fx.node.map_arg((args, kwargs), shown)
    return node.op, target, str(args), str(kwargs)


def _lines_by_module(graph: fx.Graph) -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for node in graph.nodes:
        found[module_of(node)].append(_line(node, lambda _: "value"))
    return found


def refuse_mode(path: str, mode: bool, index: int) -> NoReturn:
    """Says that a stage is not in the only mode that its code is for.

    Args:
        path: of the module.
        mode: whether the code is for training.
        index: of the stage.

    Raises:
        PartitionError: always.
    """
    expected, found = ("training", "evaluation") if mode else ("evaluation", "training")
    raise PartitionError(
        f"expected {repr(path) if path else 'the model'} in {expected} in stage {index}, as when the model was cut, "
        f"since its code does not say what it does in {found}, found it in {found}; call "
        f"{'eval' if mode else 'train'}() on the model and cut it again for that mode"
    )


class RegionInMode(nn.Module):
    """A region of a stage, which may be in another mode than the one that its code was made in.

    Args:
        region: with code.
    """

    def __init__(self, region: Generated) -> None:
        super().__init__()
        self.region = region
        self._traced = region.training
        self.train(region.training)

    def forward(self, *values: Any) -> Any:
        """Runs it as in the stage's mode."""
        if self.training == self._traced:
            return self.region(*values)
        with function_mode(_call_in_evaluation if self._traced else _call_in_training):
            return self.region(*values)


def _call_in_evaluation(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _knows_mode(function, args, kwargs):
        name = _mode_name(function)
        assert name is not None
        args, kwargs = _with(function, args, kwargs, name, 0.0 if name == _RATE else False)
    return function(*args, **kwargs)


def _call_in_training(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _knows_mode(function, args, kwargs):
        raise PartitionError(
            f"expected stages in evaluation, as when the model was cut, since their code does not say what "
            f"{getattr(function, '__name__', function)} does in training, found them in training; call train() on the "
            "model and cut it again"
        )
    return function(*args, **kwargs)
