"""``python -m torch_lms``: the command line."""

from __future__ import annotations

import sys

from torch_lms.cli import main

if __name__ == "__main__":
    sys.exit(main())
