"""The links between the devices that stages run on: measured where that is possible, else guessed, which is told."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from torch_lms.partition.link_spec import LinkSpec
from torch_lms.stages.placement import Placement, own_rank

if TYPE_CHECKING:
    from torch_lms.profile.document import Profile

__all__ = ["GUESSED_LINK", "find_links", "is_cuda_here"]

# Where links were not measured: about what Gloo does between two processes of one machine.
GUESSED_LINK = LinkSpec(bytes_per_us=1000.0, latency_us=100.0)
_GUESS = f"{GUESSED_LINK.bytes_per_us / 1000:g} GB/s and {GUESSED_LINK.latency_us:g} us are taken"
_GUESS_FROM_HERE = "those between the devices of these names in this process are taken"


def find_links(
    profile: Profile, names: Sequence[str], places: Sequence[Placement], may_measure: bool
) -> LinkSpec | Mapping[tuple[str, str], LinkSpec]:
    """Measured between devices of this process, else guessed, which is told.

    Args:
        profile: with the links that were measured.
        names: of the stages' devices.
        places: of these.
        may_measure: whether others may be measured.
    """
    place_of = dict(zip(names, places, strict=False))
    found: dict[tuple[str, str], LinkSpec] = {}
    guessed: dict[str, list[str]] = {_GUESS: [], _GUESS_FROM_HERE: []}
    for one, other in itertools.permutations(place_of, 2):
        link = _link_here(profile, place_of[one], place_of[other], may_measure)
        if link is None:
            guessed[_GUESS] += [one, other]
        elif not (place_of[one].is_local(own_rank()) and place_of[other].is_local(own_rank())):
            guessed[_GUESS_FROM_HERE] += [one, other]
        found[one, other] = link or GUESSED_LINK
    for how, between in guessed.items():
        _tell_links(how, between)
    return found


def _link_here(profile: Profile, place: Placement, other: Placement, may_measure: bool) -> LinkSpec | None:
    """As profiled or measured now, between the devices that have these names here; None if nothing can tell."""
    from torch_lms.profile.links import measure_link

    one, two = place.device, other.device
    if one == two:
        ranks = [own_rank() if each.rank is None else each.rank for each in (place, other)]
        return LinkSpec() if ranks[0] == ranks[1] else None
    link = next((link for link in profile.links if (link.source, link.target) == (str(one), str(two))), None)
    if link is None and may_measure and all(device.type == "cpu" or is_cuda_here(device) for device in (one, two)):
        link = measure_link(str(one), str(two))
    return None if link is None else LinkSpec(bytes_per_us=link.bytes_per_us, latency_us=link.latency_us)


def _tell_links(how: str, names: Sequence[str]) -> None:
    if names:
        warnings.warn(
            f"links guessed: expected links that are measured, found none between {', '.join(dict.fromkeys(names))}; "
            f"{how}: pass BalanceConfig(links=...) if they are not like that",
            stacklevel=2,
        )


def is_cuda_here(device: torch.device) -> bool:
    """Whether it is a CUDA device that this process has."""
    return device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
