"""Faults of environments. A fault fails only its own rollout, unless no rollout ever succeeds.

Used by `trainer_hooks.environments` (agent_rollouts, episodes, pool, verifiers, verifiers_v1), and
by `trainer_hooks.train.hydra_job`, which reports EnvironmentFailed.
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
    """No rollout of an environment has succeeded. `__cause__` is the last rollout's error."""


class FaultCounter:
    """Logs the faults of an environment's rollouts. Ends the run if no rollout ever succeeds."""

    def __init__(self, name: str, max_first_failures: int) -> None:
        """Start without faults. `name` is the environment's name. The run ends after
        `max_first_failures` failed rollouts if none has succeeded."""
        self._name, self._max_first_failures = name, max_first_failures
        self._log = FailureLog(f"environment {name}")
        self._num_first_failures, self._has_succeeded = 0, False

    def add_success(self) -> None:
        self._has_succeeded = True

    def add(self, fault: EnvironmentFault) -> None:
        """Log and count a fault. Raises EnvironmentFailed if too many came before the first
        success."""
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
    """Return the result of `work`.

    Raises EnvironmentFault if `work` takes longer than `timeout_s`. None sets no limit. If the
    caller is cancelled or the time is over, `work` is cancelled and ends before this function does.
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
