"""The making of stages: a traced model, cut where it is told, becomes modules on their devices, with state dicts."""

from __future__ import annotations

from torch_lms.stages.cutting import split
from torch_lms.stages.materialize import materialize
from torch_lms.stages.placement import Placement, find_device, parse_placement
from torch_lms.stages.running import Stages, run_stages
from torch_lms.stages.stage import Stage
from torch_lms.stages.state_dicts import merge_state_dicts

__all__ = [
    "Placement",
    "Stage",
    "Stages",
    "find_device",
    "materialize",
    "merge_state_dicts",
    "parse_placement",
    "run_stages",
    "split",
]
