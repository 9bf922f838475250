"""What a model costs, node by node: the time of forward and backward, sizes, and what is kept for backward."""

from __future__ import annotations

from torch_lms.profile.document import LinkProfile, NodeProfile, Profile

__all__ = ["LinkProfile", "NodeProfile", "Profile"]
