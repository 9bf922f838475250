"""The Python code of a graph: written by torch.fx, headed by the modules that its lines come from, and compiled.

The code is what runs: it can be read (`Stage.code`), saved, and stepped through, and tracebacks show its lines.

Note [Devices in code]: a tracer writes down where tensors are made, and where they go: ``arange(4,
device=device("cpu"))``. Whoever runs the code of a model on another device exchanges the one for the other, in what is
made of code inside it as well.
"""

from __future__ import annotations

import importlib
import linecache
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import fx, nn

__all__ = ["Generated", "GraphCode", "generate", "owner"]

_OWN = "own."  # see Note [Names that the stage has for itself] in stages.stage
_ASSIGNED = re.compile(r"^    (\w+)(?: : [^=]+)? = ")


class GraphCode:
    """Source code of a ``forward`` with the names that it uses.

    Attributes:
        source: the code.
        names: what its free names stand for.
        title: stands in tracebacks where a file's name would.
    """

    def __init__(self, source: str, names: Mapping[str, Any], title: str) -> None:
        self.source = source
        self.names = dict(names)
        self.title = title

    def compile(self) -> Callable[..., Any]:
        """The function ``forward(self, ...)``."""
        file = f"<{self.title}>"
        scope = dict(self.names)
        exec(compile(self.source, file, "exec"), scope)
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(keepends=True), file)
        function: Callable[..., Any] = scope["forward"]
        return function

    def __getstate__(self) -> dict[str, Any]:
        names = {
            name: _Module(value.__name__) if isinstance(value, ModuleType) else value
            for name, value in self.names.items()
        }
        return {"source": self.source, "names": names, "title": self.title}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = state["names"].items()
        self.source, self.title = state["source"], state["title"]
        self.names = {
            name: importlib.import_module(value.name) if isinstance(value, _Module) else value for name, value in names
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphCode:
        return GraphCode(self.source, self.names, self.title)


class Generated(nn.Module):
    """A module whose forward is code of a graph. Copies and pickles have it as it is: it is not traced again."""

    def set_code(self, code: GraphCode) -> None:
        """Exchanges the code that runs."""
        self._code = code
        self._run = code.compile()

    @property
    def generated(self) -> GraphCode:
        """The code with the names that it uses."""
        return self._code

    def make_on(self, device: torch.device, instead_of: torch.device) -> None:
        """Has the code make tensors on another device; see Note [Devices in code]. Modules inside are not changed."""
        source = self._code.source.replace(repr(instead_of), repr(device))
        self.set_code(GraphCode(source, self._code.names, self._code.title))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call, unused-ignore]
        self._run = self._code.compile()


class _Module:
    """Stands for a Python module where code is pickled."""

    def __init__(self, name: str) -> None:
        self.name = name


def generate(graph: fx.Graph, title: str) -> GraphCode:
    """The code of a graph, each run of lines under the path of the module that it comes from."""
    written = graph.python_code("self")
    owners = {node.name: owner(node) for node in graph.nodes}
    lines: list[str] = []
    current = ""
    for line in written.src.strip("\n").splitlines():
        found = _ASSIGNED.match(line)
        path = owners.get(found.group(1), current) if found else current
        if path and path != current:
            lines.append(f"    # {path}")
            current = path
        lines.append(line.rstrip())
    source = "\n".join(line for line in lines if line) + "\n"
    return GraphCode(source, {"torch": torch, "device": torch.device, **written.globals}, title)


def owner(node: fx.Node) -> str:
    """The path of the module whose code made the node; empty where it is not known, or the model itself."""
    if node.op in ("call_module", "get_attr"):
        target = str(node.target)
        target = target[len(_OWN) :] if target.startswith(_OWN) else target
        return target if node.op == "call_module" else target.rpartition(".")[0]
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    entry = list(stack.values())[-1]
    path = entry[0] if isinstance(entry, tuple) else list(stack)[-1]
    return str(path)
