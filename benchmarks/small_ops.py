"""What a small op costs while paging is on: where automatic mode sleeps, and where ops are observed.

A callback that sees an op's inputs refers to them. For a tensor that nothing but a Python variable refers to, this is a
first reference from C++, for which PyTorch takes Python's lock, twice. Tensors that a graph keeps for backward have one
already. So both are measured; and a view of a storage that is known, which has to be found. What PyTorch itself takes
for a callback that does nothing stands beside each: one that gets an op's inputs, as where paging is by hand, and one
that gets its outputs too, as in automatic mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

import torch_lms
from benchmarks.empty_callback import empty_callback
from benchmarks.results import Result
from benchmarks.turns import Comparison, Scope, Turns
from torch_lms._core import core

__all__ = ["measure_ops"]

_MIB = 1 << 20
_ARMED_MOST_NS = {"cpu": 150.0, "cuda": 250.0}
_ASLEEP = "automatic mode, far from its limit"
_EMPTY = {
    "an empty callback that gets inputs, no paging": False,
    "an empty callback that gets inputs and outputs, no paging": True,
}
# What two runs of the same differ by anyway.
_NOISE = 0.02


@dataclass
class _Surroundings:
    """What stands beside the op: a model that trains a little, and bytes that bring a limit near."""

    device: str
    other: torch.Tensor = field(init=False)
    filler: torch.Tensor | None = None
    model: nn.Module = field(init=False)
    x: torch.Tensor = field(init=False)
    observed: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        with torch.device(self.device):
            self.other = torch.zeros(_MIB // 4)
            self.model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(2)])
            self.x = torch.randn(8, 512)

    def train(self) -> None:
        """Some steps: their storages are large enough to be paged."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        for _ in range(6):
            self.model(self.x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def begin_far(self) -> None:
        """Automatic mode with a limit that training does not come near to."""
        torch_lms.enable({self.device: "95%"})
        self.train()

    def begin_near(self) -> None:
        """Automatic mode with a limit that is all but reached."""
        torch_lms.enable({self.device: "95%"})
        # Made here: a CPU's bytes are counted from when automatic mode begins.
        self.filler = torch.ones((1024 if self.device == "cuda" else 64) * _MIB // 4, device=self.device)
        used = core.memory_report(str(self.filler.device))["allocated_bytes"]  # of this device alone
        if self.device == "cuda":
            used = max(used, torch.cuda.memory_reserved())
        torch_lms.enable({self.device: used + used // 32})
        self.train()

    def begin_by_hand(self) -> None:
        """One storage goes out and stays there."""
        torch_lms.pageout(self.other)
        torch_lms.wait()

    def end_by_hand(self) -> None:
        """It comes back."""
        self.observed.append(core.observing_ops())
        core.pagein_all()  # beside other threads ops stay observed until then

    def end(self) -> None:
        """Automatic mode ends."""
        self.observed.append(core.observing_ops())
        self.filler = None
        torch_lms.disable()

    def scopes(self) -> dict[str, Scope]:
        """Each with what is noted at its end."""
        return {
            _ASLEEP: Scope(begin=self.begin_far, end=self.end),
            "automatic mode, near its limit": Scope(begin=self.begin_near, end=self.end),
            "something paged out": Scope(begin=self.begin_by_hand, end=self.end_by_hand),
            **{name: empty_callback(outputs=outputs) for name, outputs in _EMPTY.items()},
        }


def measure_ops(device: str, result: Result, count: int, budget_s: float) -> None:
    """An in-place op on 16 elements, plain and within each scope.

    Args:
        device: of the tensors.
        result: gets the rows and the checks.
        count: of ops that are timed together.
        budget_s: how long each may take.
    """
    surroundings = _Surroundings(device)
    scopes = surroundings.scopes()
    turns = Turns(device, budget_s=budget_s, most_rounds=100)
    small, weight = torch.zeros(2, 16, device=device)
    graph = small * weight.requires_grad_()
    known = torch.zeros(_MIB // 4, device=device)
    torch_lms.pageout(known)
    torch_lms.wait()
    core.pagein_all()
    tensors = {
        "16 elements, held by a graph": small,
        "16 elements, held by Python alone": torch.zeros(16, device=device),
        "16 elements of a known storage of 1 MiB": known.narrow(0, 1024, 16),
    }
    for held, tensor in tensors.items():
        for scope_name, scope in scopes.items():
            surroundings.observed.clear()
            found = turns.compare(partial(_negate, tensor, count), scope)
            what = f"in-place op on {held}, {device}, {scope_name}"
            _add(result, what, found, count, surroundings.observed)
            if scope_name == _ASLEEP:
                _check_asleep(result, what, found, count, surroundings.observed)
            elif scope_name not in _EMPTY:
                seen = f"{sum(surroundings.observed)} of {len(surroundings.observed)}"
                result.check(f"{what}: rounds in which ops are observed", "all", seen, ok=all(surroundings.observed))
                added, most = 1e9 * found.quiet_added / count, _ARMED_MOST_NS[device]
                result.check(f"{what}: added", f"{most:.0f} ns", round(added, 1), ok=added <= most)
    del graph


def _negate(tensor: torch.Tensor, count: int) -> None:
    negate: Callable[[], torch.Tensor] = tensor.neg_  # one dispatch; others make several
    with torch.no_grad():
        for _ in range(count):
            negate()


def _add(result: Result, what: str, found: Comparison, count: int, observed: list[bool]) -> None:
    plain, paging, added = (1e9 * seconds / count for seconds in (found.plain, found.paging, found.quiet_added))
    result.add(
        **{"what": what, "plain": plain, "paging": paging, "unit": "ns", "added": added, "ratio": found.ratio},
        **{"noise": found.noise, "rounds": found.rounds, "rounds_observed": sum(observed)},
    )


def _check_asleep(result: Result, what: str, found: Comparison, count: int, observed: list[bool]) -> None:
    """Nothing is added, and nothing sees the ops."""
    result.check(f"{what}: rounds in which ops are observed", "0", str(sum(observed)), ok=not any(observed))
    plain, added = 1e9 * found.plain / count, 1e9 * found.quiet_added / count
    result.check(f"{what}: added", f"0 ns (+- {_NOISE * plain:.0f})", round(added, 1), ok=added <= _NOISE * plain)
