"""Stages run as a pipeline: schedules as data, torch.distributed.pipelining, and an executor for older PyTorch."""

from __future__ import annotations

from torch_lms.pipeline.actions import Action, Schedule
from torch_lms.pipeline.chart import draw_charts, predict
from torch_lms.pipeline.runner import Pipeline, PipelineConfig
from torch_lms.pipeline.schedules import gpipe, interleaved, make_schedule, one_f_one_b
from torch_lms.pipeline.simulation import Event, check_schedule, in_flight, simulate
from torch_lms.pipeline.split_policy import balanced_split_policy, insert_splits

__all__ = [
    "Action",
    "Event",
    "Pipeline",
    "PipelineConfig",
    "Schedule",
    "balanced_split_policy",
    "check_schedule",
    "draw_charts",
    "gpipe",
    "in_flight",
    "insert_splits",
    "interleaved",
    "make_schedule",
    "one_f_one_b",
    "predict",
    "simulate",
]
