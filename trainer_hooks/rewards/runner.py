"""RewardRunner: calls a reward function beside the event loop, and turns failures into NaN."""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rollout.errors import ConfigError
from trainer_hooks.rewards.calling import (
    RewardFunction,
    arguments_for,
    is_async,
    name_of,
    numbers_of,
    rewards_of,
)
from trainer_hooks.rewards.processes import RewardFailed, RewardProcesses, in_thread
from trainer_hooks.rewards.turns import Turn, Turns

_log = logging.getLogger(__name__)


class RewardRunner:
    """Awaitable scores of `reward_fn(prompts, completions, completion_ids, **columns)`.

    An async function is awaited, any number at a time. Any other runs in a thread, one call at a
    time, so it need not be safe for threads; with `workers` it runs in so many spawned processes
    instead, which are replaced when they die. `timeout_s`: seconds per call; None waits for ever.
    A thread cannot be ended. If its caller is cancelled, the next call waits until the function
    returns, `timeout_s` at most. If it took too long, its result is dropped, and the next call
    begins beside it, so that a function that hangs does not hold up all others.
    A runner serves one event loop after another, and without workers several at once. Close it, or
    use it in a `with` block, to end its processes.
    """

    def __init__(
        self, reward_fn: RewardFunction, workers: int = 0, timeout_s: float | None = None
    ) -> None:
        """Raises ConfigError for numbers out of range, and for a function that workers cannot run:
        one that is async, or cannot be pickled.
        """
        if workers < 0 or (timeout_s is not None and timeout_s <= 0):
            raise ConfigError(f"workers={workers} must be 0 or more, timeout_s={timeout_s} above 0")
        if workers and is_async(reward_fn):
            raise ConfigError(f"{name_of(reward_fn)} is async: it blocks nobody, use workers=0")
        if workers:
            _check_it_travels(reward_fn)
        self._reward_fn, self._num_workers, self._timeout_s = reward_fn, workers, timeout_s
        self._processes: RewardProcesses | None = None
        self._turns = Turns(1)
        self.num_failed_calls = 0
        self.last_error: BaseException | None = None

    async def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> list[float]:
        """One reward per completion; NaN where the function gave None, NaN or infinity.

        All NaN if it raised or took too long; `last_error` says why. `columns` hold one value per
        completion. Raises ConfigError if the function needs another column, or does not return one
        number per completion: that is no failed rollout.
        """
        args, named = arguments_for(self._reward_fn, prompts, completions, completion_ids, columns)
        try:
            rewards = await self._call(args, named)
        except ConfigError:
            raise
        except Exception as error:  # the user's function may raise anything
            self.num_failed_calls += 1
            self.last_error = error
            _log.warning("reward function %s failed: %r", name_of(self._reward_fn), error)
            return [math.nan] * len(completions)
        numbers = numbers_of(self._reward_fn, rewards, len(completions))
        return [number if math.isfinite(number) else math.nan for number in numbers]

    async def _call(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._num_workers:
            if self._processes is None:
                self._processes = RewardProcesses(self._reward_fn, self._num_workers)
            return await self._processes.call(args, named, self._timeout_s)
        if is_async(self._reward_fn):
            return await self._in_time(self._reward_fn(*args, **named))
        result = await self._in_turn(args, named)
        # A plain function that returns an awaitable, such as a partial of an async one.
        return await self._in_time(result) if hasattr(result, "__await__") else result

    async def _in_turn(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        turn, has_ended = await self._turns.take(), threading.Event()

        def work() -> Any:
            try:
                return rewards_of(self._reward_fn, args, named)
            finally:
                has_ended.set()
                self._turns.give_back(turn)

        try:
            return await self._in_time(in_thread(work))
        except asyncio.CancelledError:
            self._give_back_late(turn, has_ended)
            raise
        except Exception:  # it took too long, or could not begin
            self._turns.give_back(turn)
            raise

    def _give_back_late(self, turn: Turn, has_ended: threading.Event) -> None:
        # In a thread, as the event loop may be closed before the function returns.
        def wait() -> None:
            has_ended.wait(self._timeout_s)
            self._turns.give_back(turn)

        threading.Thread(target=wait, name="reward-turn", daemon=True).start()

    async def _in_time(self, work: Any) -> Any:
        try:
            return await asyncio.wait_for(work, self._timeout_s)
        except asyncio.TimeoutError as error:
            raise RewardFailed(f"no reward within {self._timeout_s} s") from error

    def close(self) -> None:
        """End the processes; twice is fine."""
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


def _check_it_travels(reward_fn: RewardFunction) -> None:
    try:
        pickle.dumps(reward_fn)
    except Exception as error:  # pickle raises what it likes
        raise ConfigError(
            f"{name_of(reward_fn)} cannot be sent to another process ({error}); define it at the "
            "top of a module, or use workers=0"
        ) from error


def as_runner(reward_fn: RewardFunction | RewardRunner) -> tuple[RewardRunner, bool]:
    """A runner, and whether it was made here, so that the caller is to close it."""
    if isinstance(reward_fn, RewardRunner):
        return reward_fn, False
    return RewardRunner(reward_fn), True
