"""Faults of environments: a fault fails its own rollout alone, unless no rollout ever succeeds.

Used by the other modules of `trainer_hooks.environments` that run an environment's code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollout.errors import RolloutError
from trainer_hooks.rewards.failures import FailureLog

Result = TypeVar("Result")


class EnvironmentFault(RolloutError):
    """An environment raised, took too long or was closed, or a turn's request failed.

    `kind`: a name such as "step_error" or "reset_timeout", or the name of a package's error class.
    It becomes the rollout's `failure`.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EnvironmentFailed(RolloutError):
    """No rollout of an environment has ever succeeded. Its cause is the last rollout's error."""


class FaultCounter:
    """Logs the faults of an environment's rollouts. Ends the run if no rollout ever succeeds."""

    def __init__(self, name: str, max_first_failures: int) -> None:
        """`name`: the environment's. `max_first_failures`: number of failed rollouts without any
        success that ends the run.
        """
        self._name, self._max_first_failures = name, max_first_failures
        self._log = FailureLog(f"environment {name}")
        self._num_first_failures, self._has_succeeded = 0, False

    def add_success(self) -> None:
        """Count a rollout without a fault."""
        self._has_succeeded = True

    def add(self, fault: EnvironmentFault) -> None:
        """Log and count a fault. Raises EnvironmentFailed if too many came before a success."""
        cause = fault.__cause__ or fault
        self._log.add(cause)
        if self._has_succeeded:
            return
        self._num_first_failures += 1
        if self._num_first_failures >= self._max_first_failures:
            raise EnvironmentFailed(
                f"no rollout of {self._name} has succeeded: the first {self._num_first_failures} "
                f"failed, the last one with {fault.kind}: {fault}; fix the environment, or raise "
                "max_first_failures"
            ) from cause


async def in_time(work: Coroutine[Any, Any, Result], timeout_s: float | None) -> Result:
    """Return the result of `work`. Raises EnvironmentFault if it takes longer than `timeout_s`.

    If the caller is cancelled or the time is up, `work` is cancelled and has ended before this
    raises. `timeout_s` of None sets no limit.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise EnvironmentFault("rollout_timeout", f"the rollout took over {timeout_s:g} s")
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
