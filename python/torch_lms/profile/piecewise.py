"""Profiles a model that is larger than its device: parameters and values come to the device node by node.

Each node runs alone: its parameters and inputs are brought to the device, it runs forward and backward as often as it is
timed, and its outputs go back to the host. Nothing but one node is ever on the device. Sizes are noted in the first run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from torch_lms._torch_compat import named_parameters_with_ties
from torch_lms.errors import ProfileError
from torch_lms.profile.preserving import placed_on
from torch_lms.profile.sizes import SizeWatcher
from torch_lms.profile.steps import backward_of
from torch_lms.profile.storages import StorageNames, tensors_in
from torch_lms.profile.timing import RunTimer
from torch_lms.profile.tracing import TracedModel

__all__ = ["PiecewiseRun"]
