"""What a model costs, node by node: the time of forward and backward, sizes, and what is kept for backward."""

from __future__ import annotations

from torch_lms.profile.document import LinkProfile, NodeProfile, Profile
from torch_lms.profile.interpreter import ProfilingInterpreter
from torch_lms.profile.profiler import ProfileConfig, profile
from torch_lms.profile.tracing import TracedModel, trace

__all__ = [
    "LinkProfile",
    "NodeProfile",
    "Profile",
    "ProfileConfig",
    "ProfilingInterpreter",
    "TracedModel",
    "profile",
    "trace",
]
