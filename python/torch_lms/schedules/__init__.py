"""Schedules of pipelines as data: what each rank does in which order, and when that happens. No PyTorch is needed."""

from __future__ import annotations

from torch_lms.schedules.actions import Action, Schedule
from torch_lms.schedules.rules import gpipe, interleaved, make_schedule, one_f_one_b, zero_bubble
from torch_lms.schedules.simulation import Event, check_schedule, in_flight, on_ranks, simulate

__all__ = [
    "Action",
    "Event",
    "Schedule",
    "check_schedule",
    "gpipe",
    "in_flight",
    "interleaved",
    "make_schedule",
    "on_ranks",
    "one_f_one_b",
    "simulate",
    "zero_bubble",
]
