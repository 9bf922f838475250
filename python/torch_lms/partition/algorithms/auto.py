"""The default: the partition with the shortest predicted step that fits, and why.

Dynamic programming comes first: of contiguous stages that fit it finds the best, or says what may be missing.
Fiduccia-Mattheyses refinement then moves single nodes, which leaves the contiguous ones. Every other algorithm is asked
too, so that none is ever better. Where transfers go in turn the borders of the best one are shifted at last
(``shifting``).
"""

from __future__ import annotations

from torch_lms.errors import PartitionError
from torch_lms.partition.algorithms.dynamic import DynamicProgramming
from torch_lms.partition.algorithms.fiduccia_mattheyses import refine
from torch_lms.partition.interface import Algorithm, Partition, PartitionProblem, evaluate, settle
from torch_lms.partition.shifting import shift_borders

__all__ = ["Auto"]

_FINALISTS = 3


class Auto:
    """The shortest predicted step of all algorithms' that fits."""

    name = "auto"
    source = "the others"

    def __init__(self, candidates: tuple[Algorithm, ...]) -> None:
        self._others = tuple(one for one in candidates if not isinstance(one, DynamicProgramming))

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class.

        Raises:
            PartitionError: if no algorithm finds stages that fit.
        """
        made: list[Partition] = []
        refusal: PartitionError | None = None
        try:
            exact = DynamicProgramming().partition(problem)
            made += [exact, _refined(problem, exact)]
        except PartitionError as error:
            refusal = error
        for algorithm in self._others:
            try:
                made.append(algorithm.partition(problem))
            except PartitionError as error:
                refusal = refusal or error
        fitting = [one for one in made if one.fits]
        if not fitting:
            assert refusal is not None  # dynamic programming only gives what fits
            raise refusal
        if problem.cost_model.transfers_in_turn:
            fitting.append(_shifted(problem, min(fitting, key=_rank)))
        best = _best(problem, fitting)
        return Partition(**{**best.__dict__, "algorithm": "auto", "reason": _reason(best, made)})


def _refined(problem: PartitionProblem, exact: Partition) -> Partition:
    """The exact partition after refinement."""
    devices = problem.devices_of(exact.devices)
    placed, moves = refine(problem, problem.stage_of_units(exact), devices)
    reason = f"{exact.reason}, then {moves} nodes moved over borders"
    return evaluate(problem, placed, algorithm="dp+fm", reason=reason, devices=devices)


def _shifted(problem: PartitionProblem, found: Partition) -> Partition:
    """A partition after its borders were shifted."""
    devices = problem.devices_of(found.devices)
    placed, shifts = shift_borders(problem, problem.stage_of_units(found), devices)
    if shifts == 0:
        return found
    reason = f"{found.reason}, then {shifts} borders shifted"
    return evaluate(problem, placed, algorithm=found.algorithm, reason=reason, devices=devices)


def _best(problem: PartitionProblem, fitting: list[Partition]) -> Partition:
    """The best of the few that seem to be, once what their stages give up is settled; others if none of these fits."""
    by_place: dict[object, Partition] = {}
    for one in sorted(fitting, key=_rank):
        by_place.setdefault((one.devices, tuple(one.stage_of.values())), one)
    different = list(by_place.values())
    best = min((settle(problem, one) for one in different[:_FINALISTS]), key=lambda one: (not one.fits, *_rank(one)))
    others = (settle(problem, one) for one in different[_FINALISTS:])
    return best if best.fits else next((one for one in others if one.fits), best)


def _rank(one: Partition) -> tuple[float, float]:
    return one.step_us, one.bottleneck_us


def _reason(best: Partition, made: list[Partition]) -> str:
    """What was chosen, how good it is, and what the next best would have cost."""
    bound = best.lower_bound_us * best.stages / max(sum(best.stage_time_us), 1e-300)
    text = (
        f"{best.algorithm}: {best.reason}; step {best.step_us:.1f} us, largest stage {best.imbalance:.3f} times the "
        f"mean (no partition below {bound:.3f})"
    )
    others = [one for one in made if one.algorithm not in (best.algorithm, "dp", "dp+fm")]
    fitting = [one for one in others if one.fits]
    if fitting:
        second = min(fitting, key=lambda one: one.step_us)
        more = 100 * (second.step_us / best.step_us - 1) if best.step_us > 0 else 0.0
        text += f"; the best other is {second.algorithm}, {more:.1f} % longer"
    full = sorted(one.algorithm for one in others if not one.fits)
    return text + (f"; without room: {', '.join(full)}" if full else "")
