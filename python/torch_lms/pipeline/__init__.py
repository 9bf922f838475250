"""Stages run as a pipeline: torch.distributed.pipelining, and an executor for older PyTorch."""

from __future__ import annotations

from torch_lms.pipeline.chart import draw_charts, predict
from torch_lms.pipeline.config import PipelineConfig
from torch_lms.pipeline.runner import Pipeline
from torch_lms.pipeline.split_policy import balanced_split_policy, insert_splits
from torch_lms.pipeline.timeline import MeasuredStep
from torch_lms.pipeline.training import TrainingPipeline, train

__all__ = [
    "MeasuredStep",
    "Pipeline",
    "PipelineConfig",
    "TrainingPipeline",
    "balanced_split_policy",
    "draw_charts",
    "insert_splits",
    "predict",
    "train",
]
