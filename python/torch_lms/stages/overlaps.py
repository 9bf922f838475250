"""Refuses models of which stages would hold the same memory, but not the same parameter.

``b.weight = nn.Parameter(a.weight)`` makes two parameters in the same memory: an optimizer's step on one changes the
other. Stages on several devices have memory of their own each, and only a parameter that is one object is tied again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from torch_lms.errors import PartitionError
from torch_lms.shared_bytes import pairs_that_share

__all__ = ["check_memory"]

Home = tuple[int, str]  # a stage, and the name there


def check_memory(held: Iterable[tuple[Home, torch.Tensor]]) -> None:
    """Looks for trained parameters in whose memory another stage has another tensor.

    Tensors on the meta device have no memory: what they become is apart, in one piece or in stages.

    Args:
        held: all parameters and buffers of all stages.

    Raises:
        PartitionError: naming both.
    """
    homes: dict[int, list[Home]] = defaultdict(list)
    tensors: dict[int, torch.Tensor] = {}
    for home, tensor in held:
        homes[id(tensor)].append(home)
        if not tensor.is_meta:
            tensors[id(tensor)] = tensor
    found = sorted(tensors.values(), key=lambda one: not one.requires_grad)  # each is paired with the first beside it
    for one, other in ((found[first], found[then]) for first, then in pairs_that_share(found)):
        if one.requires_grad or other.requires_grad:
            _refuse_apart(homes[id(one)], homes[id(other)])


def _refuse_apart(homes: Iterable[Home], others: Iterable[Home]) -> None:
    for (stage, name), (other_stage, other_name) in ((one, other) for one in homes for other in others):
        if stage != other_stage:
            raise PartitionError(
                "expected what different stages train in memory of its own, or as one parameter, found "
                f"{name!r} of stage {stage} and {other_name!r} of stage {other_stage} as two tensors in the same "
                "memory: in stages a step of one would no longer change the other; make them one parameter "
                f"({other_name} = {name}), or put both into one stage"
            )
