"""Runs `rollout.cli.main`, the command line, for `python -m rollout`."""

from __future__ import annotations

import sys

from rollout.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
