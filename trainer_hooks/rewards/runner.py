"""RewardRunner: calls a reward function without blocking the event loop.

Used by users' training loops, `trainer_hooks.train.task`, `trainer_hooks.producer` and
`trainer_hooks.evaluation`. `trainer_hooks.rewards.scoring` calls its `score_or_raise`. A
RewardRunner starts threads or, with `workers`, processes, and logs errors.
"""

from __future__ import annotations

import asyncio
import math
import pickle
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from rollout.errors import ConfigError
from rollout.ranges import NonNegativeInt, PositiveInt, PositiveSeconds, check_value
from trainer_hooks.rewards.calling import (
    RewardFunction,
    arguments_for,
    is_async,
    name_of,
    numbers_of,
    rewards_of,
)
from trainer_hooks.rewards.failures import (
    FailureLog,
    RewardCallStillRuns,
    RewardFailed,
    RewardFunctionError,
    RewardProcessesClosed,
    SlowCallWarnings,
    raised_at,
)
from trainer_hooks.rewards.limiter import CallLimiter, Permit
from trainer_hooks.rewards.processes import RewardProcesses, Watch, in_thread

WARN_AFTER_S = 60.0


class RewardRunner:
    """Scores completions by `reward_fn(prompts, completions, completion_ids, **columns)`.

    An async function is awaited, any number of calls at a time. A plain function runs in a thread,
    one call at a time, so it need not be thread-safe. With `workers`, a plain function runs in that
    many spawned processes, which are replaced when they die.
    `timeout_s`: limit on a call in seconds. None means no limit. A thread cannot be ended, so a
    call beyond the limit keeps running there. Its result is dropped and the next call begins. After
    a cancelled call, the next call waits until the function returns, for at most `timeout_s`.
    `max_attempts`: number of calls with the same completions before a score counts as failed. A
    call that still runs in a thread is not repeated.
    `max_first_failures`: RewardFunctionError is raised if this many scores fail before any has
    succeeded. Each distinct error is logged with its traceback the first time, and briefly at its
    10th, 100th, ... time.
    `warn_after_s`: seconds after which a running call is logged with its first sample, and again at
    each doubled time. None means no warnings.
    `num_failed_calls`, `last_error`: number of attempts that failed, and the latest error or None.
    A runner serves one event loop after another. Without `workers` it serves several at once.
    `close` or a `with` block ends its processes.
    Raises ConfigError for numbers out of range, and with `workers` for a function that is async or
    cannot be pickled.
    """

    def __init__(
        self,
        reward_fn: RewardFunction,
        workers: int = 0,
        timeout_s: float | None = None,
        *,
        max_attempts: int = 3,
        max_first_failures: int = 3,
        warn_after_s: float | None = WARN_AFTER_S,
    ) -> None:
        check_value("workers", workers, NonNegativeInt, ConfigError)
        check_value("timeout_s", timeout_s, PositiveSeconds | None, ConfigError)
        check_value("max_attempts", max_attempts, PositiveInt, ConfigError)
        check_value("max_first_failures", max_first_failures, PositiveInt, ConfigError)
        check_value("warn_after_s", warn_after_s, PositiveSeconds | None, ConfigError)
        if workers and (is_async(reward_fn) or getattr(reward_fn, "awaits", False)):
            raise ConfigError(f"{name_of(reward_fn)} is async; use workers=0")
        if workers:
            _check_picklable(reward_fn)
        self._reward_fn, self._num_workers, self._timeout_s = reward_fn, workers, timeout_s
        self._processes: RewardProcesses | None = None
        self._limiter = CallLimiter(1)
        self._max_attempts, self._max_first_failures = max_attempts, max_first_failures
        self._has_succeeded, self._num_first_failures = False, 0
        self._slow = SlowCallWarnings(name_of(reward_fn), warn_after_s)
        self._failures = FailureLog(f"reward function {name_of(reward_fn)}")
        self.num_failed_calls = 0
        self.last_error: BaseException | None = None

    async def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> list[float]:
        """Return one reward per completion, NaN where the function returned None, NaN or infinity.

        All rewards are NaN if every attempt raised or took too long. `last_error` is then the
        reason.
        `columns`: lists with one value per completion.
        Raises ConfigError if the function needs another column, or does not return one number per
        completion. Raises RewardFunctionError for a function that has never succeeded.
        """
        try:
            return await self.score_or_raise(prompts, completions, completion_ids, columns)
        except RewardFailed:
            return [math.nan] * len(completions)

    async def score_or_raise(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> list[float]:
        """Return the rewards as `score` does, or raise RewardFailed if all attempts failed.

        The cause is the last attempt's error. With `workers`, a call that waits when the runner is
        closed raises RewardProcessesClosed, a RewardFailed. The other errors are those of `score`.
        """
        args, named = arguments_for(self._reward_fn, prompts, completions, completion_ids, columns)
        watch = partial(self._slow.watch, prompts, completions)
        # All attempts use the same processes: after `close`, no attempt starts new ones.
        processes = self._opened_processes()
        num_attempts = 0
        while num_attempts < self._max_attempts:
            num_attempts += 1
            try:
                rewards = await self._call(processes, args, named, watch)
            except ConfigError:
                raise
            except RewardProcessesClosed as error:
                self.last_error = error
                raise
            except Exception as error:  # the user's function may raise anything
                self.last_error = cause = error
                self.num_failed_calls += 1
                self._failures.add(error)
                if isinstance(error, RewardCallStillRuns):
                    break
            else:
                numbers = numbers_of(self._reward_fn, rewards, len(completions))
                self._has_succeeded = True
                return [number if math.isfinite(number) else math.nan for number in numbers]
        raise self._failed_score(cause, num_attempts) from cause

    def _failed_score(
        self, error: Exception, num_attempts: int
    ) -> RewardFailed | RewardFunctionError:
        name = name_of(self._reward_fn)
        if not self._has_succeeded:
            self._num_first_failures += 1
            if self._num_first_failures >= self._max_first_failures:
                return RewardFunctionError(
                    f"the reward function {name} has never succeeded: its first "
                    f"{self._num_first_failures} scores failed, the last one in {num_attempts} "
                    f"attempts with {raised_at(error)}: {error}; fix it (max_first_failures of a "
                    "RewardRunner of your own allows more)"
                )
        return RewardFailed(f"{name} failed in {num_attempts} attempts: {error!r}")

    def _opened_processes(self) -> RewardProcesses | None:
        if self._num_workers and self._processes is None:
            self._processes = RewardProcesses(self._reward_fn, self._num_workers)
        return self._processes

    async def _call(
        self,
        processes: RewardProcesses | None,
        args: tuple[Any, ...],
        named: dict[str, Any],
        watch: Watch,
    ) -> Any:
        if processes is not None:
            return await processes.call(args, named, self._timeout_s, watch)
        if is_async(self._reward_fn):
            with watch():
                return await self._in_time(self._reward_fn(*args, **named))
        result = await self._in_thread(args, named, watch)
        # A plain function that returns an awaitable, such as a partial of an async one.
        if not hasattr(result, "__await__"):
            return result
        with watch():
            return await self._in_time(result)

    async def _in_thread(self, args: tuple[Any, ...], named: dict[str, Any], watch: Watch) -> Any:
        permit, has_ended = await self._limiter.acquire(), threading.Event()

        def work() -> Any:
            try:
                return rewards_of(self._reward_fn, args, named)
            finally:
                has_ended.set()
                self._limiter.release(permit)

        try:
            with watch():
                return await self._in_time(in_thread(work))
        except asyncio.CancelledError:
            self._release_late(permit, has_ended)
            raise
        except Exception as error:  # it took too long, or could not begin
            self._limiter.release(permit)
            if isinstance(error, RewardFailed) and not has_ended.is_set():
                raise RewardCallStillRuns(str(error)) from error
            raise

    def _release_late(self, permit: Permit, has_ended: threading.Event) -> None:
        """Release `permit` when the call ends or after `timeout_s`, even if the loop is closed."""

        def wait() -> None:
            has_ended.wait(self._timeout_s)
            self._limiter.release(permit)

        threading.Thread(target=wait, name="reward-permit", daemon=True).start()

    async def _in_time(self, work: Any) -> Any:
        try:
            return await asyncio.wait_for(work, self._timeout_s)
        except asyncio.TimeoutError as error:
            raise RewardFailed(f"no reward within {self._timeout_s} s") from error

    def close(self) -> None:
        """End the processes. May be called twice. Scoring afterwards starts new processes."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_picklable(reward_fn: RewardFunction) -> None:
    try:
        pickle.dumps(reward_fn)
    except Exception as error:  # pickle may raise any error
        raise ConfigError(
            f"{name_of(reward_fn)} cannot be sent to another process ({error}); define it at the "
            "top of a module, or use workers=0"
        ) from error


def as_runner(
    reward_fn: RewardFunction | RewardRunner | None,
) -> tuple[RewardRunner | None, bool]:
    """Return a runner (None for None), and whether it is new, so that the caller must close it."""
    if reward_fn is None or isinstance(reward_fn, RewardRunner):
        return reward_fn, False
    return RewardRunner(reward_fn), True
