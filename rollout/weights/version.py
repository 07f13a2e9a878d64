"""Versions of weights: integers that only grow.

Used by ServedWeights, `rollout.engine`, the executors (`rollout.worker`, `rollout.tensor_parallel`,
`rollout_vllm`), `rollout.testing` and the coordinator's commands.
"""

from __future__ import annotations

from rollout.errors import RolloutError, WeightUpdateError

MAX_VERSION = 2**31 - 1


def next_version(
    current: int, version: object, error_type: type[RolloutError] = WeightUpdateError
) -> int:
    """Return the version of the next weights: `version`, or `current` + 1 if `version` is None.
    Raises `error_type` unless the result is an integer above `current` and at most MAX_VERSION."""
    if version is None:
        version = current + 1
    if isinstance(version, bool) or not isinstance(version, int) or version > MAX_VERSION:
        raise error_type(
            f"version={version!r} must be an integer above the current version {current} and at "
            f"most {MAX_VERSION}, because versions are stored as int32; count updates, not time"
        )
    if version <= current:
        raise error_type(
            f"version={version} must be above the current version {current}: a version is never "
            "used twice"
        )
    return version
