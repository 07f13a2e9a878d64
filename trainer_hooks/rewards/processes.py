"""RewardProcesses: processes that compute rewards, replaced when they die or take too long."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from rollout.errors import RolloutError
from trainer_hooks.rewards.calling import RewardFunction

_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 2.0

Result = TypeVar("Result")


class RewardFailed(RolloutError):
    """A reward function raised, took too long, or its process died."""


async def in_thread(work: Callable[[], Result]) -> Result:
    """The result of `work`, done in a thread of its own, which no exit of the program waits for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        outcome: tuple[Result | None, BaseException | None]
        try:
            outcome = work(), None
        except BaseException as error:
            outcome = None, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return await future


class RewardProcesses:
    """`num_workers` processes, each started when it is first needed. Lives in one event loop.

    They are spawned, so the function must be importable there, and a program that uses them must
    guard its start: `if __name__ == "__main__":`.
    """

    def __init__(self, reward_fn: RewardFunction, num_workers: int) -> None:
        self._reward_fn = reward_fn
        self._idle: asyncio.LifoQueue[_Worker | None] = asyncio.LifoQueue()
        for _ in range(num_workers):
            self._idle.put_nowait(None)  # a place for a process
        self._workers: set[_Worker] = set()
        self.num_replaced = 0

    async def call(
        self, args: tuple[Any, ...], named: dict[str, Any], timeout_s: float | None
    ) -> Any:
        """What the function returns. Raises RewardFailed; the process is replaced if it must be."""
        worker = await self._idle.get()
        try:
            if worker is None:
                worker = _Worker(self._reward_fn)
                self._workers.add(worker)
            is_ok, result = await in_thread(lambda: worker.call(args, named, timeout_s))
        except BaseException:
            # It may still compute, also for a caller who was cancelled: nobody else may get it.
            if worker is not None:
                worker.kill()
                self._workers.discard(worker)
                self.num_replaced += 1
            self._idle.put_nowait(None)
            raise
        self._idle.put_nowait(worker)
        if not is_ok:
            raise RewardFailed(result)
        return result

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()


class _Worker:
    def __init__(self, reward_fn: RewardFunction) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(its_end, reward_fn), daemon=True)
        self._process.start()
        its_end.close()
        self._is_ready = False

    def call(
        self, args: tuple[Any, ...], named: dict[str, Any], timeout_s: float | None
    ) -> tuple[bool, Any]:
        """(whether it returned, its result or its error's text). Blocks.

        Raises RewardFailed if the process is gone, or silent for too long.
        """
        try:
            if not self._is_ready:  # the imports of a new process take no reward's time
                self._receive(_START_TIMEOUT_S)
                self._is_ready = True
            self._pipe.send((args, named))
            is_ok, result = self._receive(timeout_s)
        except (EOFError, OSError) as error:
            raise RewardFailed(f"the reward's process ended: {error!r}") from error
        return is_ok, result

    def _receive(self, timeout_s: float | None) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RewardFailed(f"no reward within {timeout_s:g} s")
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(_END_TIMEOUT_S)
        # Its end is gone, so a thread that still waits at this end wakes up by itself.


def _serve(pipe: Connection, reward_fn: RewardFunction) -> None:
    """The life of a process."""
    pipe.send("ready")
    while True:
        try:
            args, named = pipe.recv()
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            answer = True, list(reward_fn(*args, **named))
        except Exception as error:  # the user's function; the other side makes a failed reward
            answer = False, f"{type(error).__name__}: {error}"
        pipe.send(answer)
