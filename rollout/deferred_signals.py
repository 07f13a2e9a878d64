"""deferred_signals: a `with` block that defers signals, such as Ctrl-C, to its end.

Used by `rollout.engine.guard`, `rollout.apis.llm` and `rollout.apis.in_process` around calls that
change an engine's state. The exception of a signal handler would stop such a call halfway. Within
the block, the process's signal handlers are replaced.
"""

from __future__ import annotations

import signal
import threading

# The functions of `signal` look numbers up in enums, which costs time in each step.
from _signal import getsignal
from _signal import signal as set_handler
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# Signals whose handlers raise in practice: Ctrl-C, termination, deadlines, user signals. SIGPROF
# and SIGCHLD are not deferred.
_NUMBERS = tuple(
    number
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if (number := getattr(signal, name, None)) is not None
)


class deferred_signals:  # a context manager, used as a function
    """Run the Python handler of a signal at the end of the block. A second signal is handled at
    once, so that Ctrl-C twice interrupts a block that hangs. Does nothing outside the main thread,
    because Python runs signal handlers only there. Blocks may be nested."""

    __slots__ = ("_handlers", "_waiting")

    def __enter__(self) -> None:
        self._handlers: list[tuple[int, Callable[[int, FrameType | None], Any]]] = []
        self._waiting: list[tuple[int, FrameType | None]] = []
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _NUMBERS:
                handler = getsignal(number)
                if callable(handler):
                    self._handlers.append((number, handler))
                    set_handler(number, self._defer)
            return
        except BaseException:
            self._restore()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        handlers = dict(self._handlers)
        self._restore()
        while self._waiting:
            number, frame = self._waiting.pop(0)
            handlers[number](number, frame)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append((number, frame))
        if len(self._waiting) > 1:
            self._waiting.pop()
            dict(self._handlers)[number](number, frame)

    def _restore(self) -> None:
        for number, handler in self._handlers:
            set_handler(number, handler)
