"""Marks for tests that chaos mode would disturb without a fault of anybody's."""

from __future__ import annotations

import os

import pytest

CHAOS = os.environ.get("TORCH_LMS_CHAOS") == "1"

counts_exactly = pytest.mark.skipif(CHAOS, reason="counts exactly; chaos adds its own")
