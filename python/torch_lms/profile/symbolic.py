"""The model's own forward, run once with symbols in place of tensors: torch.fx, and what it lacks for real models.

Beyond ``torch.fx.symbolic_trace``: arguments that are no tensors are constants, constructors such as ``torch.arange``
become nodes, containers of ``torch.nn`` are opened, and each node knows the module that it belongs to.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import fx, nn

from torch_lms._torch_compat import function_mode
from torch_lms.profile.arguments import Sample
from torch_lms.profile.ownership import set_module

__all__ = ["SymbolicError", "trace_symbolically"]

# They take no tensor, so no proxy sees them; and what they give must be new in each run of the graph.
_CONSTRUCTORS = {
    getattr(torch, name): name
    for name in (
        *("arange", "empty", "eye", "full", "linspace", "ones", "zeros", "tensor"),
        *("rand", "randint", "randn", "randperm", "tril_indices", "triu_indices"),
    )
}
_FOREIGN = frozenset({"torch", *sys.stdlib_module_names})
_TRACING = threading.RLock()  # two threads would put back each other's aids
_MISSING = object()

# Note [Aids in the model's own modules]
# While a model is traced, its code is to take a symbol for a tensor where it asks with isinstance, and its calls of
# constructors are to become nodes. A function mode of PyTorch sees constructors, in this thread alone, but not those
# that are given a symbol (torch.arange(x.shape[1])): PyTorch refuses it before any mode is asked. So the model's own
# Python modules, and those that they name, get an isinstance and a torch of their own for that time. Neither builtins
# nor torch is changed, and other threads that run the same code get what they always get. A symbol that claimed to be
# a tensor by its __class__ would need none of this, but PyTorch's C++ believes such a claim and reads what is no
# tensor.


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


def trace_symbolically(model: nn.Module, sample: Sample, leaves: frozenset[str] = frozenset()) -> fx.Graph:
    """Traces a model.

    Args:
        model: is not run and not changed.
        sample: its tensors become placeholders.
        leaves: paths of modules that stay whole.

    Returns:
        The graph; each node is noted to belong to its module (`torch_lms.profile.ownership.module_of`).

    Raises:
        SymbolicError: if that is not possible.
    """
    tracer = _Tracer(sample, leaves)
    try:
        with _tracing_aids(tracer, model):
            return tracer.trace(model)
    except Exception as error:
        raise SymbolicError(tracer.failed or "", error) from error


class _Tracer(fx.Tracer):
    def __init__(self, sample: Sample, leaves: frozenset[str]) -> None:
        super().__init__(param_shapes_constant=True)
        self._sample = sample
        self._leaves = leaves
        self._path: list[str] = []
        self.failed: str | None = None

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Makes a placeholder of each tensor of the sample."""
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._sample.names]
        return lambda root, *tensors: self._sample.call(partial(root_fn, root), tensors), [self.root, *proxies]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module stays whole: named as such, or PyTorch's own and without children."""
        if module_qualified_name in self._leaves:
            return True
        return m.__module__.startswith(("torch.nn", "torch.ao.nn")) and not any(m.children())

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Notes where a call comes from, and where tracing fails."""
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        self._path.append(path)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = path if self.failed is None else self.failed
            raise
        finally:
            self._path.pop()

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Notes the module that a node belongs to."""
        node = super().create_node(kind, target, *args, **kwargs)
        own = str(target) if kind == "call_module" else (self._path[-1] if self._path else "")
        set_module(node, str(target).rpartition(".")[0] if kind == "get_attr" else own)
        return node


@contextmanager
def _tracing_aids(tracer: fx.Tracer, model: nn.Module) -> Iterator[None]:
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
            with function_mode(aids.call):
                yield
        finally:
            for names, name, value in reversed(before):
                if value is _MISSING:
                    names.pop(name, None)
                else:
                    names[name] = value


class _Aids:
    """What stands in for ``isinstance``, ``torch`` and its constructors, in the thread that traces."""

    def __init__(self, tracer: fx.Tracer) -> None:
        self._tracer = tracer
        self._thread = threading.get_ident()
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
        """Makes a node of a constructor, wherever it is called from; all else runs."""
        return self._made.get(function, function)(*args, **kwargs)

    def _as_node(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def create(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            return self._tracer.create_proxy("call_function", original, args, kwargs)

        return create

    def _isinstance(self, value: Any, classes: Any) -> bool:
        """A symbol is a tensor to the model, though not to PyTorch; a wrong answer would trace the wrong branch."""
        if type(value) is fx.Proxy and threading.get_ident() == self._thread:
            return builtins.isinstance(value, classes) or issubclass(torch.Tensor, classes)
        return builtins.isinstance(value, classes)


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
