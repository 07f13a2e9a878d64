"""Ctrl-C that waits until something that must not be cut in two is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """A SIGINT that comes in the block is handled at its end; a second one at once."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # another thread is not interrupted
        return
    waiting: list[FrameType | None] = []

    def defer(number: int, frame: FrameType | None) -> None:
        waiting.append(frame)
        if len(waiting) == 2:
            handler(number, frame)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if waiting:
        handler(signal.SIGINT, waiting[0])
