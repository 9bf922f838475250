"""Training and evaluation: the code of stages reads the mode from their modules, where a trace wrote it down.

Note [Modes]: a trace says what was so while it was made: ``dropout(x, 0.1, True)``. In the code of a stage this is
``dropout(x, 0.1, self.layer.training)``, of the module whose code calls the function, if that module was in the same
mode, and, where it is known, is told another in the other mode. So in a graph of torch.export a ``dropout`` that the
model wants outside of training too does nothing there. A region, whose code is made already, is run under a function
mode that says the same.

What the code does not say is refused when the stage runs: in training, where the trace was made in evaluation, how
batch norms update their statistics, and the dropout of an attention that had none; and in the other mode all modules
that then compute otherwise, as a trace in that mode shows (`OtherMode`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import fx, nn

from torch_lms._torch_compat import function_mode
from torch_lms.errors import PartitionError
from torch_lms.profile.graph_code import Generated
from torch_lms.profile.ownership import module_of
from torch_lms.stages.mode_arguments import FLAG, RATE, STATISTICS, argument_names, knows_mode, mode_name, with_argument
from torch_lms.stages.other_mode import OtherMode, told

__all__ = ["ModeWriter", "RegionInMode", "refuse_mode"]


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
            if knows_mode(node.target, node.args, node.kwargs):
                self._write(node, module_of(node) if module_of(node) in modes else "")

    @property
    def paths(self) -> frozenset[str]:
        """See the class."""
        return frozenset(self._flags) | self.fixed

    def _flag(self, path: str) -> fx.Node:
        """The node that reads a module's mode, before all that computes: segments stay in one piece."""
        if path not in self._flags:
            with self._graph.inserting_before(self._first):
                name = self._own_name(f"{path}.{FLAG}" if path else FLAG)
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
        name = mode_name(node.target)
        assert name is not None
        value, training = told(node), self._modes[path]
        other = self._other.told.get(node.name)
        turned = other is training and training == self._modes[""]  # such as for `not self.training`
        if value == other or (name != RATE and value is not training and not turned):
            return  # the same in both modes
        if name == RATE:
            rate, rest = (value, other) if training else (other, value)
            if rest not in (None, 0) or rate == 0:
                return
            if rate is None:
                self.fixed |= {path} if value == 0 else set()
                return
            with self._graph.inserting_before(self._first):
                made = self._graph.create_node("call_function", operator.mul, (rate, self._flag(path)))
        elif not training and STATISTICS in argument_names(node.target):
            self.fixed.add(path)
            return
        else:
            made = self._flag(path)
            if turned:
                with self._graph.inserting_before(self._first):
                    made = self._graph.create_node("call_function", operator.not_, (made,))
        node.args, node.kwargs = with_argument(node.target, node.args, node.kwargs, name, made)


def refuse_mode(path: str, mode: bool, index: int, why: str) -> NoReturn:
    """Says that a stage is not in the only mode that its code is for.

    Args:
        path: of the module.
        mode: whether the code is for training.
        index: of the stage.
        why: what is known of the reason.

    Raises:
        PartitionError: always.
    """
    expected, found = ("training", "evaluation") if mode else ("evaluation", "training")
    why = why or f"its code does not say what it does in {found}"
    raise PartitionError(
        f"expected {repr(path) if path else 'the model'} in {expected} in stage {index}, as when the model was cut, "
        f"since {why}, found it in {found}; call "
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
    if knows_mode(function, args, kwargs):
        name = mode_name(function)
        assert name is not None
        args, kwargs = with_argument(function, args, kwargs, name, 0.0 if name == RATE else False)
    return function(*args, **kwargs)


def _call_in_training(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if knows_mode(function, args, kwargs):
        raise PartitionError(
            f"expected stages in evaluation, as when the model was cut, since their code does not say what "
            f"{getattr(function, '__name__', function)} does in training, found them in training; call train() on the "
            "model and cut it again"
        )
    return function(*args, **kwargs)
