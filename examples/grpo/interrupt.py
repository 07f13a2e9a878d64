"""Ctrl-C as a wish that the loop honours between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; a second one acts as ever.

    Ending a training step halfway would save weights that belong to no step.
    """
    requested = threading.Event()
    before = {int(name): signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}

    def request(number: int, frame: FrameType | None) -> None:
        requested.set()
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, request)
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
