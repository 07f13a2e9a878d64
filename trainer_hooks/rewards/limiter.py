"""CallLimiter: limits how many calls run at a time, over all event loops and threads.

Used by `trainer_hooks.rewards.runner`, `trainer_hooks.rewards.processes` and
`trainer_hooks.environments.python_tool`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque

Permit = asyncio.Future[None]  # done once it is granted


class CallLimiter:
    """A semaphore of `num_calls` permits, granted in the order of `acquire`.

    Unlike asyncio's semaphores, it serves all event loops. Any thread can release a permit,
    even after the caller's loop was closed.
    """

    def __init__(self, num_calls: int) -> None:
        self._num_calls = num_calls
        self._lock = threading.Lock()
        self._granted: set[Permit] = set()
        self._waiting: deque[Permit] = deque()

    async def acquire(self) -> Permit:
        """Wait for a permit and return it. The caller must `release` it."""
        permit = asyncio.get_running_loop().create_future()
        with self._lock:
            if len(self._granted) < self._num_calls:
                self._granted.add(permit)
                return permit
            self._waiting.append(permit)
        try:
            await permit
        except BaseException:  # cancelled, perhaps just after the permit was granted
            self.release(permit)
            raise
        return permit

    def release(self, permit: Permit) -> None:
        """Release `permit`, or cancel it if it waits. Any thread may call this, even twice."""
        with self._lock:
            self._granted.discard(permit)
            if permit in self._waiting:
                self._waiting.remove(permit)
            while self._waiting and len(self._granted) < self._num_calls:
                following = self._waiting.popleft()
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    following.get_loop().call_soon_threadsafe(_grant, following)
                    self._granted.add(following)


def _grant(permit: Permit) -> None:
    if not permit.done():  # the caller may have been cancelled
        permit.set_result(None)
