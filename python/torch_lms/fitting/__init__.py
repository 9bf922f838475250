"""Would it fit? The plan of a model's training step under a limit, made before training begins."""

from __future__ import annotations

from torch_lms.fitting.durations import DeviceRates
from torch_lms.fitting.interface import FitConfig, fit, trace_step

__all__ = ["DeviceRates", "FitConfig", "fit", "trace_step"]
