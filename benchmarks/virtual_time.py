"""An event loop in virtual time, for simulations of code that sleeps.

Used by `benchmarks.producer_order`, and by tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it.

    Raises AssertionError if no event is ready and no timer is set.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def jump(timeout: float | None) -> Any:
            events = select(0)
            if not events:
                assert timeout is not None, "deadlock: nothing is due, and nothing will be"
                self._now_s += max(0.0, timeout)
            return events

        selector.select = jump

    def time(self) -> float:
        """Return the virtual time in seconds, from 0."""
        return self._now_s


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` on a VirtualLoop, and return its result. Its sleeps take no real time.

    Raises AssertionError if a task is left unfinished.
    """
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(work)
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        assert not left, f"tasks left over: {left}"
        return result
    finally:
        loop.close()
