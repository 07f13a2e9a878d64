"""Turns: a limit on the calls that run at a time, over all event loops and threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque

Turn = asyncio.Future[None]  # done when it has begun


class Turns:
    """`num_turns` turns, first come, first served.

    asyncio's own locks serve only the event loop that first waited for them. These serve all loops,
    and a turn may be given back by a thread that outlives its caller and the caller's loop.
    """

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns
        self._lock = threading.Lock()
        self._holders: set[Turn] = set()
        self._waiting: deque[Turn] = deque()

    async def take(self) -> Turn:
        """Wait for a turn, which is the caller's until it is given back."""
        turn = asyncio.get_running_loop().create_future()
        with self._lock:
            if len(self._holders) < self._num_turns:
                self._holders.add(turn)
                return turn
            self._waiting.append(turn)
        try:
            await turn
        except BaseException:  # cancelled, perhaps just after the turn was given
            self.give_back(turn)
            raise
        return turn

    def give_back(self, turn: Turn) -> None:
        """End `turn`, or leave the queue. Any thread may do so, and twice is fine."""
        with self._lock:
            self._holders.discard(turn)
            if turn in self._waiting:
                self._waiting.remove(turn)
            while self._waiting and len(self._holders) < self._num_turns:
                following = self._waiting.popleft()
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    following.get_loop().call_soon_threadsafe(_begin, following)
                    self._holders.add(following)


def _begin(turn: Turn) -> None:
    if not turn.done():  # its caller may have left
        turn.set_result(None)
