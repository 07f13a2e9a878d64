"""An event loop whose clock jumps to the next timer, for simulations of code that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer instead of waiting for it; fails if there is nothing to wait for."""

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
        return self._now_s


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; its sleeps take no time. No task may be left over."""
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(work)
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        assert not left, f"tasks left over: {left}"
        return result
    finally:
        loop.close()
