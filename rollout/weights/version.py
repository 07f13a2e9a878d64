"""Versions of weights: integers that only grow."""

from __future__ import annotations

from rollout.errors import RolloutError, WeightUpdateError

MAX_VERSION = 2**31 - 1


def next_version(
    current: int, version: object, error_type: type[RolloutError] = WeightUpdateError
) -> int:
    """Return the version of the next weights: `version`, or current + 1 if that is None.

    Raises `error_type` unless `version` is an integer above the current one.
    """
    if version is None:
        version = current + 1
    if isinstance(version, bool) or not isinstance(version, int) or version > MAX_VERSION:
        raise error_type(
            f"version={version!r} must be an integer above the current version {current}, and of "
            f"at most {MAX_VERSION}, for tensors of versions are int32; count updates, not time"
        )
    if version <= current:
        raise error_type(
            f"version={version} must be above the current version {current}: a number never names "
            "two different weights"
        )
    return version
