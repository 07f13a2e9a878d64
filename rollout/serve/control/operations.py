"""Operations: runs control operations to their end even if their client disconnects.

`rollout.serve.control.state` makes it. `rollout.serve.app` runs the requests of ADMIN routes in it,
and `rollout.serve.control.weight_transfer` runs commits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class Operations:
    """The running control operations of a server, each in its own task."""

    def __init__(self) -> None:
        # A client that disconnects cancels its handler, but not the operation's task.
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` in a task and return its result or raise its error. If the caller is
        cancelled, the task continues and its error is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_error)
            raise

    async def end(self, timeout_s: float) -> None:
        """Wait for all operations, at most `timeout_s` seconds. Then cancel the unfinished ones."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _log_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _logger.warning("a control operation failed after its client disconnected: %s", error)
