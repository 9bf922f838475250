"""What is known of the devices that stages run on: how fast they are, and the links between them."""

from __future__ import annotations

import itertools
import pickle
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from torch_lms.partition.link_spec import LinkSpec
from torch_lms.stages.placement import Placement, own_rank

if TYPE_CHECKING:
    from torch_lms.profile.document import Profile
    from torch_lms.ranks.circle import Circle

__all__ = ["GUESSED_LINK", "DeviceSpeeds", "find_links", "is_cuda_here"]

# Where links were not measured: about what Gloo does between two processes of one machine.
GUESSED_LINK = LinkSpec(bytes_per_us=1000.0, latency_us=100.0)
_GUESS = f"{GUESSED_LINK.bytes_per_us / 1000:g} GB/s and {GUESSED_LINK.latency_us:g} us are taken"
_GUESS_FROM_HERE = "those between the devices of these names in this process are taken"
_ALIKE = 0.05  # devices that differ by less count as equal: two measurements of one differ by up to half of it
_WORK, _LATE_S = "work of ", 60.0  # how long the first rank waits for what another one has measured


class DeviceSpeeds:
    """What the same work takes on the stages' devices; as `torch_lms.profile.speeds.work_us` measures it.

    Only CUDA devices are measured, and only where there are several.

    Args:
        circle: of all ranks; None for one process.
        places: of the stages.
        profiled: where the first rank profiles the model.
        rest_share: of the time, how long devices rest between parts of the work.
        given: what they are instead; then nothing is measured.
    """

    def __init__(
        self,
        circle: Circle | None,
        places: Sequence[Placement],
        profiled: torch.device,
        rest_share: float,
        given: Sequence[float] | None = None,
    ) -> None:
        self._circle, self._places, self._given, self._rest_share = circle, places, given, rest_share
        self._cuda = [stage for stage, place in enumerate(places) if place.device.type == "cuda"]
        self._profiled = profiled if own_rank() == 0 else None
        self._profiled_us: float | None = None
        self._work_us: dict[int, float] = {}  # by stage

    def measure(self) -> None:
        """This rank's devices; all ranks call it at about the same time, and the first one is told."""
        if self._given is not None or len({self._places[stage] for stage in self._cuda}) < 2:
            return
        here = {stage: place.device for stage in self._cuda if (place := self._places[stage]).is_local(own_rank())}
        wanted = {*here.values(), *([self._profiled] if self._profiled is not None else [])}
        found = _measure([device for device in wanted if device.type == "cuda"], self._rest_share)
        self._profiled_us = None if self._profiled is None else found.get(self._profiled)
        self._work_us = {stage: found[device] for stage, device in here.items() if device in found}
        if self._circle is not None and own_rank() != 0:
            self._circle.put(f"{_WORK}{own_rank()}", pickle.dumps(self._work_us))

    def of_stages(self) -> Sequence[float]:
        """On the first rank: the speed of each stage's device, times the profiled one's; 1 where it is not known."""
        profiled_us = self._profiled_us
        if self._given is not None or profiled_us is None:
            return self._given or [1.0] * len(self._places)
        if self._circle is not None:
            self._hear(self._circle)
        _tell_speeds([str(self._places[stage]) for stage in self._cuda if stage not in self._work_us])
        found = [profiled_us / self._work_us.get(stage, profiled_us) for stage in range(len(self._places))]
        return [1.0 if abs(speed - 1) < _ALIKE else speed for speed in found]

    def _hear(self, circle: Circle) -> None:
        others = {self._places[stage].rank for stage in self._cuda} - {None, own_rank()}
        end = time.monotonic() + _LATE_S
        for rank in others:
            told = circle.wait(f"{_WORK}{rank}", end - time.monotonic())
            self._work_us.update({} if told is None else pickle.loads(told))


def _measure(devices: Collection[torch.device], rest_share: float) -> Mapping[torch.device, float]:
    """Nothing where there is no memory for it."""
    from torch_lms.profile.preserving import is_lack_of_memory
    from torch_lms.profile.speeds import work_us

    try:
        return work_us(devices, rest_share) if devices else {}
    except RuntimeError as error:
        if not is_lack_of_memory(error):
            raise
        return {}


def _tell_speeds(names: Sequence[str]) -> None:
    if names:
        warnings.warn(
            f"speeds guessed: expected devices whose speed is measured, found none of {', '.join(dict.fromkeys(names))}"
            "; that of the profiled device is taken: pass BalanceConfig(speeds=...) if they are slower or faster",
            stacklevel=2,
        )


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
