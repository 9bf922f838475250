"""Parts of an exported graph that ran in a mode, such as ``torch.no_grad``: each is a module that runs in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from torch_lms.profile.aliases import memory_of
from torch_lms.profile.graph_code import Generated, generate
from torch_lms.profile.random_draws import draws

__all__ = ["Region", "is_assertion", "is_region"]

_KNOWS_NO_AUTOCAST = "meta"


def is_assertion(node: fx.Node) -> bool:
    """Whether a node only looks whether all is as it was while the model was traced, such as the device."""
    return not node.users and "assert" in str(node.target)


def is_region(node: fx.Node) -> bool:
    """Whether a node calls a graph in a mode."""
    return getattr(node.target, "namespace", "") == "higher_order"


class Region(Generated):
    """A part of the model that ran under ``torch.no_grad`` or another mode, kept whole; regions in it are modules.

    Args:
        graph_module: of the part; it is changed, and not needed afterwards.
        mode: takes ``arguments``, what it has to run, and what that is to be given.
        arguments: of the mode.

    Attributes:
        memory: what the part does to the memory of what it is given.
        draws: whether it draws random numbers.
        graph: that the code is of; copies and pickles are without.
    """

    def __init__(self, graph_module: fx.GraphModule, mode: Any, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self._mode = mode
        self._arguments = arguments
        self.graph = graph = graph_module.graph
        for node in list(graph.nodes):
            if is_assertion(node):
                graph.erase_node(node)
            elif is_region(node):
                self._open(node, graph_module)
        for node in list(graph.nodes):
            if node.op == "get_attr":
                self._keep(node, graph_module)
        modules = dict(self.named_modules())
        self.memory = memory_of(graph, modules)
        self.draws = any(draws(node, modules) for node in graph.nodes)
        self.set_code(generate(graph, f"a part under {mode}"))

    @classmethod
    def of(cls, node: fx.Node, holder: nn.Module) -> tuple[Region, tuple[Any, ...]]:
        """The region that a node calls, and what it is given.

        Args:
            node: of a graph that `torch.export` made.
            holder: has the region's graph.
        """
        place = next(index for index, arg in enumerate(node.args) if getattr(arg, "op", "") == "get_attr")
        graph_module = getattr(holder, str(node.args[place].target))  # type: ignore[union-attr]
        return cls(graph_module, node.target, tuple(node.args[:place])), tuple(node.args[place + 1 :])

    def _open(self, node: fx.Node, holder: nn.Module) -> None:
        """Puts a call of a module in place of a region inside."""
        name = f"region_{len(self._modules)}"
        region, given = Region.of(node, holder)
        self.add_module(name, region)
        with node.graph.inserting_before(node):
            made = node.graph.create_node("call_module", name, given)
        node.replace_all_uses_with(made)
        node.graph.erase_node(node)

    def _keep(self, node: fx.Node, holder: nn.Module) -> None:
        """Takes over a constant that the part reads."""
        if not node.users:  # the graph of a region
            node.graph.erase_node(node)
        elif str(node.target) not in self._buffers:
            self.register_buffer(str(node.target), getattr(holder, str(node.target)), persistent=False)

    def extra_repr(self) -> str:
        """The mode."""
        return f"{self._mode}, {self._arguments}"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "graph"}

    def make_on(self, device: torch.device, instead_of: torch.device) -> None:
        """As of `Generated`; autocast is then the other device's."""
        super().make_on(device, instead_of)
        self._arguments = tuple(device.type if given == instead_of.type else given for given in self._arguments)

    def forward(self, *values: Any) -> Any:
        """Runs the part in its mode."""
        if _KNOWS_NO_AUTOCAST in self._arguments:
            return self._inside(*values)
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # PyTorch does not put it back after an error
            return self._mode(*self._arguments, self._inside, *values)

    def _inside(self, *values: Any) -> Any:
        return self._run(self, *values)
