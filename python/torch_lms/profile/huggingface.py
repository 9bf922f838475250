"""What a Hugging Face model must be told so that its graph is what training runs.

Traced as it is, such a model returns a cache of keys and values, which no graph holds, and writes its causal mask out,
so that attention takes a slower kernel than the model itself does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from torch_lms.profile.arguments import Sample

__all__ = ["as_in_training"]


@contextmanager
def as_in_training(model: nn.Module, sample: Sample, notes: list[str]) -> Iterator[None]:
    """Turns off caches, checkpointing and written-out masks; does nothing to other models.

    Args:
        model: its configurations get their options back.
        sample: what it asks for itself stays.
        notes: get a line on what was changed.
    """
    changes: list[tuple[Any, str, Any]] = []
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    if "use_cache" not in sample.constants:
        cached = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
        changes += [(config, "use_cache", False) for config in cached]
        notes += ["use_cache is off, as in training"] if cached else []
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", None) is True]
    changes += [(module, "gradient_checkpointing", False) for module in checkpointed]
    notes += ["gradient checkpointing is off: a graph has no recomputation in it"] if checkpointed else []
    masks = sys.modules.get("transformers.masking_utils")
    if masks is not None and configs:
        changes += _mask_changes(masks, sample)
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    try:
        for place, name, value in changes:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def _mask_changes(masks: Any, sample: Sample) -> list[tuple[Any, str, Any]]:
    """Lets masks be left out where their absence does not depend on data."""
    changes: list[tuple[Any, str, Any]] = []
    if hasattr(masks, "is_torchdynamo_exporting"):
        # An exported program is for any input; this graph is for the sample's shapes.
        changes.append((masks, "is_torchdynamo_exporting", lambda: False))
    is_tracing = getattr(masks, "is_tracing", None)
    if is_tracing is not None:
        # Without a padding mask it depends on shapes alone whether attention is plainly causal.
        changes.append((masks, "is_tracing", lambda tensor=None: tensor is not None and is_tracing(tensor)))
    if hasattr(masks, "find_packed_sequence_indices") and "position_ids" not in sample.names:
        # Positions that the model counts itself are those of one sequence.
        changes.append((masks, "find_packed_sequence_indices", lambda position_ids: None))
    return changes
