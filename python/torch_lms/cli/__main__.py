"""``python -m torch_lms.cli``: as ``python -m torch_lms``."""

from __future__ import annotations

import sys

from torch_lms.cli import main

if __name__ == "__main__":
    sys.exit(main())
