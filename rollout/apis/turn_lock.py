"""TurnLock: a lock that is granted in the order it was asked for."""

from __future__ import annotations

import threading


class TurnLock:
    """As threading.RLock, but a thread that takes it again and again cannot keep another from it.

    `threading.Lock` goes to whoever asks first after a release, and that is the thread which has
    just released it: a loop of steps would starve the thread that brings new weights.
    """

    def __init__(self) -> None:
        self._entrance = threading.Lock()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._entrance:  # held while waiting, so that the others wait behind
                self._lock.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()
