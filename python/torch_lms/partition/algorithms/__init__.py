"""The partition algorithms, one a file, each after its paper or program."""

from __future__ import annotations

from torch_lms.errors import PartitionError
from torch_lms.partition.algorithms.auto import Auto
from torch_lms.partition.algorithms.block import BalanceBySize, BalanceByTime, BlockPartition
from torch_lms.partition.algorithms.dapple import DapplePlanner
from torch_lms.partition.algorithms.dawnpiper import DawnPiper
from torch_lms.partition.algorithms.deepspeed import Parameters, TypeRegex, Uniform
from torch_lms.partition.algorithms.dynamic import DynamicProgramming
from torch_lms.partition.algorithms.fiduccia_mattheyses import FiducciaMattheyses
from torch_lms.partition.algorithms.least_variance import LeastVariance
from torch_lms.partition.algorithms.merging import BottomUpMerging
from torch_lms.partition.algorithms.sagemaker import ModuleTree
from torch_lms.partition.interface import Algorithm

__all__ = ["algorithm_names", "find_algorithm"]

# The one list of algorithms, each with its own name; ``auto`` asks all others.
_CANDIDATES: tuple[Algorithm, ...] = (
    DynamicProgramming(),
    FiducciaMattheyses(),
    Uniform(),
    Parameters(),
    BalanceByTime(),
    BalanceBySize(),
    BlockPartition(),
    LeastVariance(),
    DapplePlanner(),
    ModuleTree(),
    BottomUpMerging(),
    DawnPiper(),
)
_ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in (Auto(_CANDIDATES), *_CANDIDATES)}
_TYPE = "type:"


def algorithm_names() -> tuple[str, ...]:
    """The names that `find_algorithm` knows, ``auto`` first; ``type:`` and a regular expression is one more."""
    return tuple(_ALGORITHMS)


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        PartitionError: if there is none.
    """
    if name.startswith(_TYPE):
        return TypeRegex(name[len(_TYPE) :])
    if name not in _ALGORITHMS:
        known = ", ".join(_ALGORITHMS)
        raise PartitionError(f"expected an algorithm among {known} or type:<regex>, found {name!r}; name one of these")
    return _ALGORITHMS[name]
