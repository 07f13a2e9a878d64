"""Runs `main` of `trainer_hooks.doctor.command`, for `python -m trainer_hooks.doctor`."""

import sys

from trainer_hooks.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
