"""Puts a model's parameters, buffers and submodules into stages, under the names that they have in the model."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx, nn

from torch_lms.profile.regions import Region
from torch_lms.stages.extra_state import EXTRA_STATE, KeepsExtraState, has_extra_state, state_dict_hooks
from torch_lms.stages.modes import RegionInMode
from torch_lms.stages.overlaps import check_memory
from torch_lms.stages.own_modes import Modes, SetsModes
from torch_lms.stages.stage import Stage

__all__ = [
    "KINDS",
    "Container",
    "find_shared",
    "follow_modes",
    "hold_modes",
    "install",
    "named_tensors",
    "sort_entries",
]

KINDS = ("_parameters", "_buffers", "_modules")  # where a module holds what it has


class Container(SetsModes, KeepsExtraState):
    """Stands for a module of the model whose code was opened: it only holds what is inside."""


def install(
    stages: Sequence[Stage], root: nn.Module, nodes: Sequence[Sequence[fx.Node]], model: nn.Module | None
) -> None:
    """Gives each stage what its code reads, in the model's order, and all else that the model holds to a neighbour."""
    origin = root if model is None else model
    order, twins = tuple(_names_in_order(origin)), _twins(origin)
    for stage, own in zip(stages, nodes, strict=False):
        targets = {str(node.target) for node in own if node.op == "call_module"}
        sources = {source for node in own for source in node.all_input_nodes}
        targets |= {str(node.target) for node in sources if node.op == "get_attr"}
        if stage.index + 1 == stage.count:
            output = list(own[0].graph.nodes)[-1]
            targets |= {str(node.target) for node in output.all_input_nodes if node.op == "get_attr"}
        for target in sorted(targets):
            _put(stage, root, target)
    if model is not None:
        _put_rest(stages, model)
        _keep_extra_states(stages, model)
    for stage in stages:
        stage.order, stage.twins = order, twins
        sort_entries(stage, order)
    find_shared(stages)


def sort_entries(module: nn.Module, order: Sequence[str]) -> None:
    """Brings what containers hold into an order of names, so that of parameters and state dicts is the model's."""
    places = {name: place for place, name in enumerate(order)}

    def sort(holder: nn.Module, prefix: str) -> None:
        for kind in KINDS:
            held = vars(holder)[kind]
            entries = sorted(held.items(), key=lambda entry: places.get(prefix + entry[0], len(places)))
            held.clear()
            held.update(entries)
        for name, child in holder._modules.items():
            if isinstance(child, Container):
                sort(child, f"{prefix}{name}.")

    sort(module, "")


def hold_modes(stage: Stage, model: nn.Module, paths: Iterable[str]) -> None:
    """Has a stage hold its own mode, and those of modules whose code was opened.

    Args:
        stage: is given containers.
        model: has the modules.
        paths: of those whose mode the stage has to know.
    """
    stage.training = model.training
    for path in paths:
        _open(stage, model, path.split(".") if path else [])


def follow_modes(stages: Sequence[Stage], modes: Mapping[str, Modes]) -> None:
    """Has containers set the modes that a `train` of the model's own sets; see Note [A model's own train].

    Args:
        stages: that hold all of the model.
        modes: by the path of a module.
    """
    for stage in stages:
        for path, own in modes.items():
            held = _held(stage, path)
            if isinstance(held, SetsModes):
                held.set_modes(own)


def _open(stage: Stage, model: nn.Module, path: Sequence[str]) -> tuple[nn.Module, nn.Module]:
    """What stands for a module of the model in a stage, and that module; containers hold the place of those around."""
    holder: nn.Module = stage
    source = model
    for part in path:
        source = getattr(source, part)
        if part not in holder._modules:
            holder._modules[part] = Container().train(source.training)
        held = holder._modules[part]
        assert held is not None
        holder = held
    return holder, source


def _names_in_order(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Of all that a module holds: each module before what is in it."""
    for name in (*module._parameters, *module._buffers, *([EXTRA_STATE] if has_extra_state(module) else [])):
        yield prefix + name
    for name, child in module._modules.items():
        yield prefix + name
        if child is not None:
            yield from _names_in_order(child, f"{prefix}{name}.")


def _twins(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each module that has several; those around come before those inside."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[id(module)].append(name)
    return tuple(tuple(found) for found in names.values() if len(found) > 1)


def _put(stage: Stage, root: nn.Module, target: str) -> None:
    """Sets one attribute of the model in the stage."""
    *path, name = target.split(".")
    holder, source = _open(stage, root, path)
    value = getattr(source, name)
    if isinstance(value, Region):
        value = RegionInMode(value)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        holder._buffers[name] = value
        holder._non_persistent_buffers_set.discard(name)
        if not _is_persistent(source, name):
            holder._non_persistent_buffers_set.add(name)
    elif holder is stage:
        stage.hold(name, value)
    else:
        setattr(holder, name, value)


def _is_persistent(module: nn.Module, name: str) -> bool:
    """Plain tensor attributes, such as a tracer's constants, stay out of state dicts as they were."""
    return name in module._buffers and name not in module._non_persistent_buffers_set


def named_tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Every name of every parameter and buffer, tied ones under each of their names."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, value in [*child._parameters.items(), *child._buffers.items()]:
            if value is not None:
                yield (f"{prefix}.{name}" if prefix else name), value


def _put_rest(stages: Sequence[Stage], model: nn.Module) -> None:
    """Parameters and buffers that no node reads go to the stage with the nearest relatives by name."""
    held = {name: stage for stage in stages for name, _ in named_tensors(stage)}
    for name, _ in list(named_tensors(model)):
        if name in held:
            continue

        def kinship(other: str, name: str = name) -> int:
            pairs = zip(other.split("."), name.split("."), strict=False)
            return next((depth for depth, (a, b) in enumerate(pairs) if a != b), 0)

        nearest = max(held, key=kinship, default=None)
        stage = held[nearest] if nearest is not None else stages[-1]
        _put(stage, model, name)
        held[name] = stage


def _keep_extra_states(stages: Sequence[Stage], model: nn.Module) -> None:
    """Of modules whose code was opened: each in the first stage that has a part of it."""
    hooked = []
    for path, module in model.named_modules(remove_duplicate=False):
        parts = [(stage, _held(stage, path)) for stage in stages]
        if any(part is not None and not isinstance(part, KeepsExtraState) for _, part in parts):
            continue  # the module itself, or one in it
        if has_extra_state(module):
            stage = next((stage for stage, part in parts if part is not None), stages[0])
            holder, _ = _open(stage, model, path.split(".") if path else [])
            assert isinstance(holder, KeepsExtraState)
            holder.keep_extra_state(module.get_extra_state())
        if state_dict_hooks(module):
            hooked.append(path or type(model).__name__)
    if hooked:
        warnings.warn(
            f"expected modules whose state dicts have no hooks, found some of {', '.join(hooked[:5])}, which the "
            "stages' state dicts are without; load and save those of the model where that matters",
            stacklevel=2,
        )


def _held(stage: Stage, path: str) -> nn.Module | None:
    """What a stage has of a module: a container, or the module that it is or is in; None for nothing."""
    holder: nn.Module = stage
    for part in path.split(".") if path else []:
        found = holder._modules.get(part)
        if found is None or not isinstance(found, KeepsExtraState):
            return found
        holder = found
    return holder


def find_shared(stages: Sequence[Stage]) -> None:
    """Notes for each stage which of its parameters and buffers are also in other stages, by identity.

    Raises:
        PartitionError: for what is in the same memory in another way, and would train apart.
    """
    check_memory(((stage.index, name), value) for stage in stages for name, value in named_tensors(stage))
    homes: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for stage in stages:
        for name, value in named_tensors(stage):
            homes[id(value)].append((stage.index, name))
    for stage in stages:
        stage.shared = {
            name: tuple(home for home in homes[id(value)] if home[0] != stage.index)
            for name, value in named_tensors(stage)
            if any(home[0] != stage.index for home in homes[id(value)])
        }
