"""The model's own forward, run once with symbols in place of tensors: torch.fx, and what it lacks for real models.

Beyond ``torch.fx.symbolic_trace``: arguments that are no tensors are constants, constructors such as ``torch.arange``
become nodes, containers of ``torch.nn`` are opened, each node knows the module that it belongs to, and the model is
called as its users call it, with its hooks. A module with hooks for its backward stays whole, for it to run them.

Note [Nothing is computed while tracing]: the graph must do in each step what the model does. So buffers are symbols as
parameters are, and a call whose tensors are all true ones (``self.parameters()``, plain attributes) becomes a node as
well: its result would else be a constant, and what it writes would be written once. What a graph cannot say is refused,
so that another source takes the model: values that Python reads, modes such as ``torch.no_grad`` and autocast, and
attributes that are assigned.
"""

from __future__ import annotations

import builtins
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from operator import attrgetter, getitem
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import fx, nn

from torch_lms._torch_compat import function_mode, named_parameters_with_ties
from torch_lms.profile.arguments import Sample
from torch_lms.profile.attributes import Attributes, plain_tensors, refuse_assigned
from torch_lms.profile.calls import BACKWARDS, LEAVING, READS, has_tensors, property_of, target_of
from torch_lms.profile.generators import PythonDraws, generators_kept
from torch_lms.profile.hooks import has_backward_hooks, refuse_backward_hooks
from torch_lms.profile.mappings import is_own_mapping
from torch_lms.profile.modes import Modes
from torch_lms.profile.names import check_name
from torch_lms.profile.next_call import describe, refuse_other_call
from torch_lms.profile.ownership import set_module
from torch_lms.profile.preserving import storages_of
from torch_lms.profile.symbols import Known, Symbol, is_tensor

__all__ = ["SymbolicError", "trace_symbolically"]

# They take no tensor, so no proxy sees them; and what they give must be new in each run of the graph.
_CONSTRUCTORS = {
    getattr(torch, name): name
    for name in (
        *("arange", "empty", "eye", "full", "linspace", "ones", "zeros", "tensor"),
        *("rand", "randint", "randn", "randperm", "tril_indices", "triu_indices"),
    )
}
# They tell of a tensor what the graph may hold as a constant, or are Python's own.
_TELLING = frozenset(
    [
        *("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size", "get_device"),
        *("is_complex", "is_contiguous", "is_floating_point", "is_inference", "is_pinned", "is_shared", "is_signed"),
        *("__len__", "__hash__", "__repr__", "__format__", "__dir__"),
    ]
)
_FOREIGN = frozenset({"torch", *sys.stdlib_module_names})
_TRACING = threading.RLock()  # two threads would put back each other's aids
_MISSING = object()

# Note [Aids in the model's own modules]
# While a model is traced, its code is to take a symbol for a tensor where it asks with isinstance, and its calls of
# constructors are to become nodes. A function mode of PyTorch sees constructors, in this thread alone, but not those
# that are given a symbol (torch.arange(x.shape[1])): PyTorch refuses it before any mode is asked. So the model's own
# Python modules, and those that they name, get an isinstance and a torch of their own for that time. Neither builtins
# nor torch is changed, but for autocast and what torch.fx itself changes of nn.Module, and other threads that run the
# same code get what they always get. A symbol that claimed to be a tensor by its __class__ would need none of this, but
# PyTorch's C++ believes such a claim and reads what is no tensor.


class SymbolicError(Exception):
    """Tracing has failed in a module.

    Attributes:
        path: the module's qualified path; empty for the model itself.
        error: what was raised.
    """

    def __init__(self, path: str, error: Exception) -> None:
        super().__init__(path, error)
        self.path = path
        self.error = error


def trace_symbolically(
    model: nn.Module, sample: Sample, attributes: Attributes, leaves: frozenset[str] = frozenset()
) -> fx.Graph:
    """Traces a model.

    Args:
        model: is not run, and left as it was, but that it gets what the graph holds as constants.
        sample: its tensors become placeholders.
        attributes: of the model, as they are.
        leaves: paths of modules that stay whole.

    Returns:
        The graph; each node is noted to belong to its module (`torch_lms.profile.ownership.module_of`).

    Raises:
        SymbolicError: if that is not possible.
    """
    make = partial(_Tracer, model, sample, leaves)
    tracer = make()
    try:
        with torch.enable_grad():
            refuse_backward_hooks([("", model)])
            with generators_kept() as draws:
                graph = _trace(tracer, model, attributes)
                drawn = draws.any()
            if drawn:
                tracer = make(draws=True)
                with generators_kept() as draws:
                    _trace(tracer, model, attributes)
                    draws.refuse()
            if not attributes.changed:
                return graph
            tracer = make()
            return _trace_next_call(tracer, model, attributes, graph)
    except Exception as error:
        raise SymbolicError(tracer.failed or "", error) from error


def _trace_next_call(tracer: _Tracer, model: nn.Module, attributes: Attributes, graph: fx.Graph) -> fx.Graph:
    """See `torch_lms.profile.next_call`; a graph is its own, since both would be given the same names of constants."""
    changes, read = attributes.changed, lambda name: attrgetter(name)(model)
    first = describe(graph, read)
    attributes.put_back()
    for change in changes:
        change.make()
    with generators_kept():
        graph = _trace(tracer, model, attributes)
    tracer.failed = next((change.module for change in changes if change.module), "")
    refuse_other_call(first, describe(graph, read), changes)
    return graph


def _trace(tracer: _Tracer, model: nn.Module, attributes: Attributes) -> fx.Graph:
    """Undoes what the forward assigns, and refuses what the graph then lacks."""
    buffers = {name for name, _ in model.named_buffers()}
    read: set[str] = set()
    for module in model.modules():
        vars(module).pop("_compiled_call_impl", None)  # of nn.Module.compile, which takes no symbols
    try:
        with _tracing_aids(tracer, model):
            graph = tracer.trace(model)
        read |= {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    finally:
        replaced = attributes.put_back(keep=read)
    refuse_assigned(replaced & (read | buffers))
    return graph


class _Tracer(fx.Tracer):
    """Traces one model; with ``draws`` it looks which module draws random numbers that are not PyTorch's."""

    def __init__(self, model: nn.Module, sample: Sample, leaves: frozenset[str], *, draws: bool = False) -> None:
        super().__init__()
        self._draws = draws
        self._names: dict[int, str] = {}
        for name, tensor in (*named_parameters_with_ties(model), *model.named_buffers()):
            self._names.setdefault(id(tensor), name)
        self._known: dict[str, Known] = {}
        self.modes = Modes()
        self._sample = sample
        self._leaves = leaves
        self._path: list[str] = []
        self._thread = threading.get_ident()  # torch.fx asks for what all threads call and read
        self.failed: str | None = None

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Makes a placeholder of each tensor of the sample."""
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._sample.names]
        return lambda root, *tensors: self._sample.call(root, tensors), [self.root, *proxies]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module stays whole: named as such, hooked, or PyTorch's own and without children."""
        if m is self.root:
            return False
        if module_qualified_name in self._leaves or has_backward_hooks(m):
            return True
        return m.__module__.startswith(("torch.nn", "torch.ao.nn")) and not any(m.children())

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Notes where a call comes from, and where tracing fails."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        self._path.append(path)
        try:
            draws = PythonDraws() if self._draws else None
            found = super().call_module(m, forward, args, kwargs)
            if draws is not None:
                draws.refuse()
            return found
        except Exception:
            self.failed = path if self.failed is None else self.failed
            raise
        finally:
            self._path.pop()

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        """A symbol for each parameter and buffer."""
        if threading.get_ident() != self._thread:
            return attr_val
        name = self._names.get(id(attr_val))
        return attr_val if name is None else self.known(name, attr_val)

    _module_getattr = getattr  # its name in PyTorch 1.12

    def known(self, name: str, tensor: torch.Tensor) -> Known:
        """The symbol for a tensor of the model."""
        if name not in self._known:
            self._known[name] = Known(self.create_node("get_attr", name, (), {}), self, tensor)
        return self._known[name]

    def proxy(self, node: fx.Node) -> Symbol:
        """The symbol for what a node gives."""
        return Symbol(node, self)

    def create_arg(self, a: Any) -> Any:
        """What stands for a value as the argument of a node; see Note [Nothing is computed while tracing]."""
        if isinstance(a, torch.Tensor) and id(a) not in self._names and a not in self.tensor_attrs:
            self._check_constant(a)
        if is_own_mapping(a) and not dataclasses.is_dataclass(a):
            return self.create_node("call_function", type(a), (), {name: self.create_arg(a[name]) for name in a})
        return super().create_arg(a)

    def _check_constant(self, value: torch.Tensor) -> None:
        """Refuses a constant that was computed, as far as can be seen: PyTorch 1.12 does not show all calls."""
        own = [*self.root.parameters(), *self.root.buffers(), *plain_tensors(self.root).values()]
        with torch._C.DisableTorchFunction():  # else the question is one of the model's
            computed = value.grad_fn is not None or bool(storages_of([value]) & storages_of(own))
        if computed:
            raise TypeError("expected tensors of the model itself, found one that was made of them while tracing")

    def of_tensors(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A node for a call all of whose tensors are true ones; see Note [Nothing is computed while tracing]."""
        name = getattr(function, "__name__", str(function))
        if name == "__get__":
            value = function(*args, **kwargs)
            args = (args[0], property_of(function))
            return self.create_proxy(*target_of(function, name), args, {}) if has_tensors(value) else value
        if name in _TELLING:
            return function(*args, **kwargs)
        if name in READS or name in LEAVING:
            raise TypeError(f"expected a forward that computes with symbols, found {name}, which needs values")
        if name == "__iter__":
            return (self.create_proxy("call_function", getitem, (args[0], place), {}) for place in range(len(args[0])))
        return self.create_proxy(*target_of(function, name), args, kwargs)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Notes the module that a node belongs to."""
        check_name(kind, target)
        if kind.startswith("call_") and target in BACKWARDS:
            raise TypeError(
                "expected a forward without a backward in it, found one, which no call can be that stands alone"
            )
        if kind.startswith("call"):
            self.modes.check()
        node = super().create_node(kind, target, *args, **kwargs)
        own = str(target) if kind == "call_module" else (self._path[-1] if self._path else "")
        set_module(node, str(target).rpartition(".")[0] if kind == "get_attr" else own)
        return node


@contextmanager
def _tracing_aids(tracer: _Tracer, model: nn.Module) -> Iterator[None]:
    """See Note [Aids in the model's own modules]."""
    aids = _Aids(tracer)
    with _TRACING:
        before: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for module in _modules_of(model):
                names = vars(module)
                for name, aid in aids.of(names).items():
                    before.append((names, name, names.get(name, _MISSING)))
                    names[name] = aid
            with function_mode(aids.call), tracer.modes.watched(), _set_to_themselves(aids.thread):
                yield
        finally:
            for names, name, value in reversed(before):
                if value is _MISSING:
                    names.pop(name, None)
                else:
                    names[name] = value


@contextmanager
def _set_to_themselves(thread: int) -> Iterator[None]:
    """Lets a buffer be set to what has worked on it in place, as ``self.count += 1`` does: to itself alone."""
    assign = nn.Module.__setattr__

    def set_other(module: nn.Module, name: str, value: Any) -> None:
        held = vars(module)  # nothing as yet in a module that is being made
        own = {**held.get("_parameters", {}), **held.get("_buffers", {})}.get(name)
        if threading.get_ident() != thread or own is None:
            assign(module, name, value)
        elif type(value) is not Known or value.value is not own:
            refuse_assigned([name])

    nn.Module.__setattr__ = set_other  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]


class _Aids:
    """What stands in for ``isinstance``, ``torch`` and its constructors, in the thread that traces."""

    def __init__(self, tracer: _Tracer) -> None:
        self._tracer = tracer
        self.thread = threading.get_ident()
        self._made = {function: self._as_node(function) for function in _CONSTRUCTORS}
        self._torch = ModuleType(torch.__name__, torch.__doc__)
        vars(self._torch).update(vars(torch))
        vars(self._torch).update({_CONSTRUCTORS[function]: made for function, made in self._made.items()})

    def of(self, names: dict[str, Any]) -> dict[str, Any]:
        """The aids for a module with these names."""
        found: dict[str, Any] = {"isinstance": self._isinstance}
        for name, value in names.items():
            if value is torch:
                found[name] = self._torch
            elif type(value) is BuiltinFunctionType and value in self._made:
                found[name] = self._made[value]
        return found

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes nodes of constructors, and of what is called with true tensors alone; symbols see to their own."""
        if function not in self._made and has_tensors((args, kwargs)) and not _has_symbols((args, kwargs)):
            return self._tracer.of_tensors(function, args, kwargs)
        return self._made.get(function, function)(*args, **kwargs)

    def _as_node(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def create(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                return original(*args, **kwargs)
            return self._tracer.create_proxy("call_function", original, args, kwargs)

        return create

    def _isinstance(self, value: Any, classes: Any) -> bool:
        """A symbol is a tensor to the model, though not to PyTorch; a wrong answer would trace the wrong branch."""
        if is_tensor(value) and threading.get_ident() == self.thread:
            kind = type(value.value) if type(value) is Known else torch.Tensor
            return builtins.isinstance(value, classes) or issubclass(kind, classes)
        return builtins.isinstance(value, classes)


def _has_symbols(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_symbols, value.values()))
    if isinstance(value, slice):
        return _has_symbols((value.start, value.stop, value.step))
    return isinstance(value, fx.Proxy) or (isinstance(value, (tuple, list)) and any(map(_has_symbols, value)))


def _modules_of(model: nn.Module) -> list[ModuleType]:
    """The Python modules that the model's code is in, and those that they name, one from the other."""
    waiting = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    waiting |= {getattr(module.forward, "__module__", "") for module in model.modules()}
    found: dict[str, ModuleType] = {}
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if name in found or not isinstance(module, ModuleType) or _is_foreign(name):
            continue
        found[name] = module
        for value in list(vars(module).values()):
            if issubclass(type(value), ModuleType):  # isinstance would ask the value, and a lazy one would wake up
                waiting.add(value.__name__)
            elif issubclass(type(value), FunctionType | type):
                waiting.add(value.__module__)
    return list(found.values())


def _is_foreign(name: str) -> bool:
    """Whether a module has no code of a model in it: Python's and PyTorch's own, and the tracer's."""
    return name.partition(".")[0] in _FOREIGN or f"{name}.".startswith("torch_lms.profile.")
