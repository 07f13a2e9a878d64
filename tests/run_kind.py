"""Which kind of run this is: `make quick`, `make test` or `make test-long`."""

from __future__ import annotations

import os


def is_quick() -> bool:
    return os.environ.get("ROLLOUT_TEST_QUICK") == "1"


def is_long() -> bool:
    return os.environ.get("ROLLOUT_TEST_LONG") == "1"


def max_examples() -> int:
    """Return how many examples a property test draws, unless it says otherwise."""
    if is_long():
        return 1000
    return 5 if is_quick() else 25


def scaled(count: int) -> int:
    """Return how many of `count` examples a property test draws: all in a long run, else a third,
    in `make quick` a tenth.
    """
    if is_long():
        return count
    return max(count // (10 if is_quick() else 3), 3)
