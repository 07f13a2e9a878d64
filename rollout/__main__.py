"""Runs `rollout.cli.main` for `python -m rollout`, the command line."""

from __future__ import annotations

import sys

from rollout.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
