"""Schedules of pipelines as data: what each rank does in which order, and when that happens. No PyTorch is needed."""

from __future__ import annotations

from torch_lms.schedules.actions import Action, Schedule
from torch_lms.schedules.rules import gpipe, interleaved, make_schedule, one_f_one_b
from torch_lms.schedules.simulation import Event, check_schedule, in_flight, simulate

__all__ = [
    "Action",
    "Event",
    "Schedule",
    "check_schedule",
    "gpipe",
    "in_flight",
    "interleaved",
    "make_schedule",
    "one_f_one_b",
    "simulate",
]
