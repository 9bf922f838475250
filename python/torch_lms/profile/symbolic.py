"""The model's own forward, run once with symbols in place of tensors: torch.fx, and what it lacks for real models.

Beyond ``torch.fx.symbolic_trace``: arguments that are no tensors are constants, constructors such as ``torch.arange``
become nodes, containers of ``torch.nn`` are opened, and each node knows the module that it belongs to.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import fx, nn

from torch_lms.profile.arguments import Sample
from torch_lms.profile.ownership import set_module

__all__ = ["SymbolicError", "trace_symbolically"]

# They take no tensor, so no proxy sees them; and what they give must be new in each run of the graph.
_CONSTRUCTORS = (
    *("arange", "empty", "eye", "full", "linspace", "ones", "zeros", "tensor"),
    *("rand", "randint", "randn", "randperm", "tril_indices", "triu_indices"),
)


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
        with _tracing_aids(tracer):
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
def _tracing_aids(tracer: fx.Tracer) -> Iterator[None]:
    """Makes nodes of constructors, and lets symbols pass for tensors where the model asks."""

    def as_node(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def create(*args: Any, **kwargs: Any) -> Any:
            return tracer.create_proxy("call_function", original, args, kwargs)

        return create

    originals: list[tuple[Any, str, Any]] = [(torch, name, getattr(torch, name)) for name in _CONSTRUCTORS]
    for module, name, original in originals:
        setattr(module, name, as_node(original))
    originals.append((builtins, "isinstance", isinstance))
    builtins.isinstance = _isinstance
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


_ORIGINAL_ISINSTANCE = isinstance


def _isinstance(value: Any, classes: Any) -> bool:
    """A symbol is a tensor to the model, though not to PyTorch; a wrong answer would trace the wrong branch."""
    if type(value) is fx.Proxy and sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] != "torch":
        wanted = classes if _ORIGINAL_ISINSTANCE(classes, tuple) else (classes,)
        return torch.Tensor in wanted or _ORIGINAL_ISINSTANCE(value, classes)
    return _ORIGINAL_ISINSTANCE(value, classes)
