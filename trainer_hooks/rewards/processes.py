"""RewardProcesses: processes that compute rewards, replaced when they die or take too long.

Used by `trainer_hooks.rewards.runner`. `trainer_hooks.rewards.reward_model` and
`trainer_hooks.train.main` use `in_thread`. RewardProcesses starts and kills child processes. Calls
run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from subprocess import TimeoutExpired
from typing import Any, TypeVar

from rollout.child_process import ChildProcess, pickled
from rollout.errors import ConfigError, RolloutError
from trainer_hooks.rewards.calling import RewardFunction
from trainer_hooks.rewards.failures import RewardFailed, RewardProcessesClosed
from trainer_hooks.rewards.limiter import CallLimiter

_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 2.0

Result = TypeVar("Result")
Watch = Callable[[], AbstractContextManager[None]]


def in_thread(work: Callable[[], Result], name: str = "reward") -> asyncio.Future[Result]:
    """Run `work` in a daemon thread `name`, and return a future of its result or error.

    The thread does not delay the program's exit. A StopIteration becomes a RewardFailed.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if future.done():  # its caller was cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        outcome: tuple[Result | None, BaseException | None]
        try:
            outcome = work(), None
        except StopIteration as error:  # a future cannot hold it
            failure = RewardFailed(f"StopIteration: {error}")
            failure.__cause__ = error
            outcome = None, failure
        except BaseException as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits the result
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class RewardProcesses:
    """Up to `num_workers` processes that call one function, each started when it is first needed.

    The processes are spawned, so they must be able to import the function. A program that defines
    the function itself must guard its start by `if __name__ == "__main__":`.
    `num_replaced`: number of processes killed because their call failed or was cancelled.
    """

    def __init__(self, reward_fn: RewardFunction, num_workers: int) -> None:
        self._reward_fn = reward_fn
        self._limiter = CallLimiter(num_workers)
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._is_closed = False
        self.num_replaced = 0

    async def call(
        self,
        args: tuple[Any, ...],
        named: dict[str, Any],
        timeout_s: float | None,
        watch: Watch = nullcontext,
    ) -> Any:
        """Call the function in a process. Returns the result of `rewards_of` there.

        `timeout_s`: limit on the call, without the start of a process. None means no limit.
        `watch`: returns a context for the call, entered when a process is free.
        Kills the process of a call that takes too long or is cancelled.
        Raises ConfigError if the function raises it. Raises RewardFailed if the function raises
        another error, if it takes too long and if its process dies. Raises RewardProcessesClosed if
        the processes are closed while the call waits for one.
        """
        permit = await self._limiter.acquire()
        try:
            if self._is_closed:
                raise RewardProcessesClosed(
                    "the reward's processes were closed before the call began"
                )
            with watch():
                return await self._call_one(args, named, timeout_s)
        finally:
            self._limiter.release(permit)

    async def _call_one(
        self, args: tuple[Any, ...], named: dict[str, Any], timeout_s: float | None
    ) -> Any:
        worker = self._idle.pop() if self._idle else self._start()
        try:
            rewards, error = await in_thread(lambda: worker.call(args, named, timeout_s))
        except BaseException:
            # The process may still compute, so no other call may get it.
            worker.kill()
            self._workers.discard(worker)
            self.num_replaced += 1
            raise
        self._idle.append(worker)
        if error is not None:
            raise error from error.__cause__
        return rewards

    def _start(self) -> _Worker:
        worker = _Worker(self._reward_fn)
        self._workers.add(worker)
        return worker

    def close(self) -> None:
        """Kill all processes. Calls that are running fail, and no further process is started."""
        self._is_closed = True
        for worker in self._workers:
            worker.kill()
        self._workers.clear()


class _Worker:
    def __init__(self, reward_fn: RewardFunction) -> None:
        self._reward_fn = pickled(reward_fn, f"the reward function {reward_fn!r}")
        try:
            self._process = ChildProcess("trainer_hooks.rewards.process")
        except ConfigError as error:  # the system may have room for a process later
            raise RewardFailed(str(error)) from error
        self._is_ready = False

    def call(
        self, args: tuple[Any, ...], named: dict[str, Any], timeout_s: float | None
    ) -> tuple[Any, Exception | None]:
        """Return the function's result and None, or None and the error to raise. Blocks.

        Raises RewardFailed if the process ended or did not reply within `timeout_s`.
        """
        pipe = self._process.pipe
        try:
            if not self._is_ready:  # the imports of a new process do not count as reward time
                self._process.send(self._reward_fn)
                self._process.receive(_START_TIMEOUT_S)
                self._is_ready = True
            pipe.send((args, named))
            if not pipe.poll(timeout_s):
                raise RewardFailed(f"no reward within {timeout_s:g} s")
            rewards, error, cause = pipe.recv()
        except (EOFError, OSError, RolloutError) as fault:
            if isinstance(fault, RewardFailed):
                raise
            raise RewardFailed(f"the reward's process ended: {fault!r}") from fault
        if error is not None:
            error.__cause__ = cause  # pickling an error loses its cause
        return rewards, error

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        # The child's pipe end is closed, so a thread blocked in recv() gets EOFError.
