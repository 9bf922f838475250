"""The device that a model is on, and the one that its graph makes tensors on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from torch_lms.errors import ProfileError
from torch_lms.profile.graph_code import Generated

__all__ = ["device_of", "devices_of", "fits", "made_on"]


def devices_of(model: nn.Module) -> set[torch.device]:
    """The devices of a model's parameters and buffers."""
    return {tensor.device for tensor in [*model.parameters(), *model.buffers()]}


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters and buffers; the CPU if it has none.

    Raises:
        ProfileError: if they are on several.
    """
    found = devices_of(model)
    if len(found) > 1:
        names = ", ".join(sorted(map(str, found)))
        raise ProfileError(f"expected a model on one device, found {type(model).__name__} on {names}; move it to one")
    return next(iter(found), torch.device("cpu"))


def fits(model: nn.Module, device: torch.device) -> bool:
    """Whether a model on another device has room on this one, with its gradients; activations are not known yet."""
    if device.type != "cuda" or device_of(model) == device:
        return True
    needed = sum(tensor.numel() * tensor.element_size() * (1 + tensor.requires_grad) for tensor in model.parameters())
    free, _ = torch.cuda.mem_get_info(device)
    return needed <= free


@contextmanager
def made_on(graph_module: fx.GraphModule, source: torch.device, target: torch.device) -> Iterator[None]:
    """Has a graph that was traced on one device make its tensors on another; puts it back afterwards.

    See Note [Devices in code] in graph_code.
    """
    nodes: list[tuple[fx.Node, Any, Any]] = []
    changed: list[fx.GraphModule] = []
    generated: list[tuple[Generated, dict[str, Any]]] = []

    def exchange(value: Any) -> Any:
        return target if isinstance(value, torch.device) and value == source else value

    for module in graph_module.modules():
        if isinstance(module, Generated):
            generated.append((module, dict(vars(module))))
            module.make_on(target, source)
        if not isinstance(module, fx.GraphModule):
            continue
        own = [node for node in module.graph.nodes if source in _devices_in(node)]
        for node in own:
            nodes.append((node, node.args, node.kwargs))
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), exchange)
        changed += [module] if own else []
    try:
        for module in changed:
            module.recompile()
        yield
    finally:
        for node, args, kwargs in nodes:
            node.args, node.kwargs = args, kwargs
        for module in changed:
            module.recompile()
        for one, before in generated:
            vars(one).update(before)


def _devices_in(node: fx.Node) -> set[torch.device]:
    found: set[torch.device] = set()

    def note(value: Any) -> Any:
        found.update({value} if isinstance(value, torch.device) else ())
        return value

    fx.node.map_aggregate((node.args, node.kwargs), note)
    return found
