"""Operations: control operations that run to their end even if their client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class Operations:
    """The control operations of a server that have not ended. Each has a task of its own, so that
    the end of a client's connection, which cancels its handler, never stops an operation halfway.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return what `work` returns, or raise its error. A caller that is cancelled leaves the
        operation to its end; an error is logged then.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_error)
            raise

    async def end(self, timeout_s: float) -> None:
        """Wait for all operations; cancel those that have not ended after `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _log_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _logger.warning("a control operation whose client has gone failed: %s", error)
