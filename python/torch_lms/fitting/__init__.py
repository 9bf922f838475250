"""Would it fit? The plan of a model's training step under a limit, made before training begins."""

from __future__ import annotations

from torch_lms import _fork

if _fork.is_here():
    _fork.refuse("fit", "make the plan with stock PyTorch 2.11 or later")

from torch_lms.fitting.durations import DeviceRates
from torch_lms.fitting.interface import FitConfig, fit, trace_step

__all__ = ["DeviceRates", "FitConfig", "fit", "trace_step"]
