"""StageClock: the time that a stage of a run has taken, and an estimate of the time left.

Used by `trainer_hooks.metrics.console` and `trainer_hooks.train.dashboard`.
`trainer_hooks.train.report` and `trainer_hooks.train.summary` use `minutes`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean

from trainer_hooks.metrics.figures import WINDOW_STEPS, time_left_s


class StageClock:
    """Measures one stage at a time. `clock`: function that returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_steps = self._step = 0
        self._start_s: float | None = None
        self._reached_s = 0.0
        self._step_s: float | None = None
        self._own_s: deque[float] = deque(maxlen=WINDOW_STEPS)

    def start(self, num_steps: int | None) -> None:
        """Begin a stage of `num_steps`, or of an unknown number of steps if it is None."""
        self._num_steps, self._start_s = num_steps or 0, self._clock()
        self._reached_s, self._step, self._step_s = self._start_s, 0, None
        self._own_s.clear()

    def reach(self, step: int, step_s: float | None = None) -> None:
        """Record that `step`, counted from 1, is done. A repeated step is ignored.

        `step_s`: seconds per step, as `step_seconds` returns it. None means the mean of this
        stage's latest steps by the clock.
        """
        if step == self._step:
            return
        # The first recorded step took the time since `start`. A resumed run begins at a later step.
        now_s, num_new = self._clock(), step - self._step if self._step else 1
        self._own_s.append((now_s - self._reached_s) / max(num_new, 1))
        self._step, self._reached_s = step, now_s
        self._step_s = fmean(self._own_s) if step_s is None else step_s

    def text(self) -> str:
        """Return text such as "elapsed 2:10, left 8:40", or "" before a stage has begun.

        The time left is omitted before the first step is done, after the last one, and if the
        number of steps is unknown.
        """
        if self._start_s is None:
            return ""
        now_s = self._clock()
        elapsed = f"elapsed {minutes(now_s - self._start_s)}"
        num_left = self._num_steps - self._step
        if self._step_s is None or num_left < 1:
            return elapsed
        left_s = time_left_s(self._step_s, num_left, now_s - self._reached_s)
        return f"{elapsed}, left {minutes(left_s)}"


def minutes(seconds: float) -> str:
    """Return seconds as text, such as 3:07 or 1:03:07."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    text = f"{rest // 60:02}:{rest % 60:02}"
    return f"{hours}:{text}" if hours else text.removeprefix("0")
