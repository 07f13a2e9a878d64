"""StageClock: the time that a stage of a run has taken, and an estimate of the time left.

Used by ProgressView and `trainer_hooks.train.dashboard`; `trainer_hooks.train.report` formats times
by `minutes`.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class StageClock:
    """Measures one stage at a time. `clock`: function that returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_steps = 0
        self._start_s: float | None = None
        self._first_step: int | None = None
        self._step = 0

    def start(self, num_steps: int | None) -> None:
        """Begin a stage of `num_steps`; None if the number is not known."""
        self._num_steps, self._start_s = num_steps or 0, self._clock()
        self._first_step, self._step = None, 0

    def reach(self, step: int) -> None:
        """Record that `step`, counted from 1, is done.

        Steps before the first recorded one are not in the time of this stage, since a resumed run
        continues at a later step.
        """
        if self._first_step is None:
            self._first_step = max(step - 1, 0)
        self._step = step

    def text(self) -> str:
        """Return text such as "elapsed 2:10, left 8:40", or "" before a stage has begun.

        The time left is omitted before the first step is done, after the last one, and if the
        number of steps is unknown.
        """
        if self._start_s is None:
            return ""
        elapsed_s = self._clock() - self._start_s
        num_done = self._step - (self._first_step or 0)
        num_left = self._num_steps - self._step
        if num_done < 1 or num_left < 1:
            return f"elapsed {minutes(elapsed_s)}"
        return f"elapsed {minutes(elapsed_s)}, left {minutes(elapsed_s / num_done * num_left)}"


def minutes(seconds: float) -> str:
    """Return seconds as text, such as 3:07 or 1:03:07."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    text = f"{rest // 60:02}:{rest % 60:02}"
    return f"{hours}:{text}" if hours else text.removeprefix("0")
