"""Where to cut a model into the stages of a pipeline: costs, and algorithms behind one interface."""

from __future__ import annotations

from torch_lms.partition.algorithms import algorithm_names, find_algorithm
from torch_lms.partition.algorithms.dynamic import LeastCaps, least_caps
from torch_lms.partition.costs import (
    OPTIMIZER_MULTIPLIERS,
    CostGraph,
    CostModel,
    CostNode,
    DataParallel,
    DeviceSpec,
    links_from_profile,
    optimizer_multiplier,
)
from torch_lms.partition.interface import Algorithm, Partition, PartitionProblem
from torch_lms.partition.link_spec import LinkSpec
from torch_lms.partition.partitioning import partition
from torch_lms.partition.recompute_and_swap import RecomputeAndSwap
from torch_lms.partition.relief import KEEP_ALL, Choice, GivenUp, MemoryRelief, Relieved, StageNeed, StageRelief
from torch_lms.partition.units import check_partition

__all__ = [
    "KEEP_ALL",
    "OPTIMIZER_MULTIPLIERS",
    "Algorithm",
    "Choice",
    "CostGraph",
    "CostModel",
    "CostNode",
    "DataParallel",
    "DeviceSpec",
    "GivenUp",
    "LeastCaps",
    "LinkSpec",
    "MemoryRelief",
    "Partition",
    "PartitionProblem",
    "RecomputeAndSwap",
    "Relieved",
    "StageNeed",
    "StageRelief",
    "algorithm_names",
    "check_partition",
    "find_algorithm",
    "least_caps",
    "links_from_profile",
    "optimizer_multiplier",
    "partition",
]
