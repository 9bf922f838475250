"""State dicts of a model and of its stages: the same names, so that they merge, and a stage finds its entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch_lms.errors import PartitionError
from torch_lms.profile.sameness import is_same
from torch_lms.stages.stage import Stage

__all__ = ["find_entry", "in_order", "merge_state_dicts"]

StateDict = Mapping[str, Any]


def merge_state_dicts(stages: Iterable[Stage | StateDict]) -> dict[str, Any]:
    """The model's state dict from those of its stages.

    Args:
        stages: the stages, or the state dict of each, as gathered from other processes.

    Returns:
        All entries; those of stages in the model's order.

    Raises:
        PartitionError: if a tied weight or a shared buffer differs between stages.
    """
    merged: dict[str, Any] = {}
    order: tuple[str, ...] = ()
    for stage in stages:
        order = stage.order if isinstance(stage, Stage) else order
        shared = stage.shared if isinstance(stage, Stage) else {}
        for name, value in (stage.state_dict() if isinstance(stage, Stage) else stage).items():
            for known in (name, *(other for _, other in shared.get(name, ()))):
                if known in merged and not is_same(merged[known], value):
                    raise PartitionError(
                        f"expected {name!r} equal in all stages that share it, found two values; its gradients were "
                        "not summed over these stages before the optimizer's step"
                    )
            merged.setdefault(name, value)
    return in_order(merged, order)


def in_order(state_dict: StateDict, order: Iterable[str]) -> dict[str, Any]:
    """The entries in an order of names; others follow."""
    return {name: state_dict[name] for name in (*(one for one in order if one in state_dict), *state_dict)}


def find_entry(state_dict: StateDict, stage: Stage, name: str) -> Any:
    """A name's value in the model's state dict, where a tied weight may stand under another of its names; or None."""
    if name in state_dict:
        return state_dict[name]
    values = stage.state_dict(keep_vars=True)
    within = [other for other, value in values.items() if name in values and value is values[name]]
    across = [other for own in (name, *within) for _, other in stage.shared.get(own, ())]
    return next((state_dict[other] for other in (*within, *across) if other in state_dict), None)
