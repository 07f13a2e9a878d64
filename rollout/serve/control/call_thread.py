"""CallThread: runs blocking calls beside the event loop, one after the other."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_Job = tuple[Callable[[], Any], "Future[Any]"]


class CallThread:
    """A daemon thread: a call that waits for a peer keeps neither the event loop nor the end of the
    process waiting, as one in the loop's own executor would.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, call: Callable[[], _Result]) -> _Result:
        """Return what `call` returns. A caller that is cancelled does not stop a call that runs."""
        result: _Result = await asyncio.wrap_future(self.submit(call))
        return result

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run `call` after those before it."""
        future: Future[Any] = Future()
        self._jobs.put((call, future))
        return future

    def close(self) -> None:
        """End the thread after the calls that it has."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # it belongs to whoever waits for the future
                future.set_exception(error)
            del job, call, future  # so that an idle thread keeps no tensors
