"""Polling for a change by another process or thread that sets no event. Used by all tests.

Use the event where there is one. The deadline is generous: a machine may be slow, and a test that
fails at it has hung.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

DEADLINE_S = 300.0
_LOOK_EVERY_S = 0.01


def until(condition: Callable[[], object], what: str) -> None:
    """Return once `condition()` is true; `what` names it in the failure."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(_LOOK_EVERY_S)


async def until_async(
    condition: Callable[[], object | Awaitable[object]],
    what: str,
    every_s: float = _LOOK_EVERY_S,
) -> None:
    """Wait as `until` does, while other tasks run. `condition` may be a coroutine function."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        answer = condition()
        if await answer if isinstance(answer, Awaitable) else answer:
            return
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        await asyncio.sleep(every_s)
