"""TimeAccount: divides the trainer's seconds into categories that add up to the wall time.

Used by users' training loops, `trainer_hooks.train.main` and `trainer_hooks.train.dashboard`.
`trainer_hooks.metrics.measure` uses StepTimes. EngineUse divides the engines' time into computing
and idle.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rollout.control.reports import EngineStats
from rollout.errors import ConfigError, RolloutError
from trainer_hooks.phase import PhaseTimings

OTHER = "other"
CATEGORIES = (
    "generate",  # the trainer only runs the engine, or waits for it
    "wait",  # the trainer waits for rollouts of engines that run beside it
    "suspend",
    "update",
    "resume",
    "train",
    "reward",
    "checkpoint",
    "evaluate",
    OTHER,  # time outside all blocks
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of one step, by category.

    `wall_s`: wall time, the sum of `seconds`.
    `shares`: `seconds` divided by `wall_s`. In a step of no length, the share of `other` is 1.
    """

    wall_s: float
    seconds: Mapping[str, float]
    shares: Mapping[str, float]

    def as_metrics(self) -> dict[str, float]:
        """Return `timing_s/step`, `timing_s/<category>` and `timing_share/<category>`."""
        return {
            "timing_s/step": self.wall_s,
            **{f"timing_s/{name}": value for name, value in self.seconds.items()},
            **{f"timing_share/{name}": value for name, value in self.shares.items()},
        }


class TimeAccount:
    """Charges every moment to the category of the innermost open block, or to `other`.

    An account follows one thread or asyncio task, the trainer's. While it has a block open, calls
    from another thread or task raise RolloutError, since the same second would count twice.
    `clock`: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds = dict.fromkeys(CATEGORIES, 0.0)
        self._clock = clock
        self._lock = threading.Lock()
        self._open_blocks: list[_Block] = []
        self._step_start_s = self._charged_until_s = clock()

    @contextmanager
    def spend(self, category: str) -> Iterator[None]:
        """Charge the time of the block, without the blocks inside it, to `category`.

        Raises ConfigError for a category that is not one of CATEGORIES. Raises RolloutError while
        another thread or task has a block open.
        """
        self._check_category(category)
        block = _Block(category, _current_timeline())
        with self._lock:
            self._check_timeline(block.timeline)
            self._charge()
            self._open_blocks.append(block)
        try:
            yield
        finally:
            with self._lock:
                self._charge()
                self._open_blocks.remove(block)

    @property
    def current(self) -> str:
        """The category that is charged now. Any thread may read it."""
        with self._lock:
            return self._open_blocks[-1].category if self._open_blocks else OTHER

    def reassign(self, source: str, target: str, seconds: float) -> float:
        """Move `seconds` of this step to another category. Returns the seconds moved.

        At most the seconds of `source` are moved, and none if `seconds` is negative. Raises
        ConfigError for an unknown category.
        """
        self._check_category(source)
        self._check_category(target)
        with self._lock:
            self._check_timeline(_current_timeline())
            self._charge()
            moved = min(max(seconds, 0.0), self._seconds[source])
            self._seconds[source] -= moved
            self._seconds[target] += moved
            return moved

    def reassign_phase(self, timings: PhaseTimings) -> None:
        """Move the push, resume and suspend seconds from `generate` to their categories."""
        self.reassign("generate", "update", timings.update_s)
        self.reassign("generate", "resume", timings.resume_s)
        self.reassign("generate", "suspend", timings.suspend_s)

    def take(self) -> StepTimes:
        """Return the times of the step that ends now, and begin the next. Open blocks stay open."""
        with self._lock:
            self._check_timeline(_current_timeline())
            self._charge()
            wall_s = self._charged_until_s - self._step_start_s
            seconds = dict(self._seconds)
            self._seconds = dict.fromkeys(seconds, 0.0)
            self._step_start_s = self._charged_until_s
        if wall_s > 0.0:
            shares = {name: value / wall_s for name, value in seconds.items()}
        else:
            shares = {name: float(name == OTHER) for name in seconds}
        return StepTimes(wall_s=wall_s, seconds=seconds, shares=shares)

    def _charge(self) -> None:
        now_s = self._clock()
        category = self._open_blocks[-1].category if self._open_blocks else OTHER
        self._seconds[category] += now_s - self._charged_until_s
        self._charged_until_s = now_s

    def _check_category(self, category: str) -> None:
        if category not in self._seconds:
            raise ConfigError(
                f"category={category!r} is not in this time account; it has "
                f"{', '.join(self._seconds)}"
            )

    def _check_timeline(self, timeline: _Timeline) -> None:
        if self._open_blocks and self._open_blocks[-1].timeline != timeline:
            block = self._open_blocks[-1]
            raise RolloutError(
                f"this time account is used from two timelines at once: {block.timeline} has "
                f"{block.category!r} open, and {timeline} uses it; give each its own TimeAccount"
            )


class EngineUse:
    """Measures the fraction of time that `num_engines` engines beside the trainer spend computing.

    `clock`: returns seconds. Raises ConfigError for `num_engines` below 1.
    """

    def __init__(
        self, num_engines: int = 1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if num_engines < 1:
            raise ConfigError(f"num_engines={num_engines} must be 1 or more")
        self._num_engines = num_engines
        self._clock = clock
        self._last: tuple[float, EngineStats] | None = None

    def take(self, stats: EngineStats) -> dict[str, float]:
        """Return the metrics of the time since the last call, or {} at the first call.

        The metrics are `engine/busy_share`, `engine/idle_share` and `engine/tokens_per_s`.
        `stats`: statistics of one engine, or their sum over all `num_engines`.
        """
        now_s, last = self._clock(), self._last
        self._last = (now_s, stats)
        if last is None:
            return {}
        wall_s = max(now_s - last[0], 1e-9)
        busy_s = _growth(last[1].step_seconds, stats.step_seconds)
        busy_share = min(busy_s / (wall_s * self._num_engines), 1.0)
        num_tokens = _growth(last[1].num_sampled_tokens, stats.num_sampled_tokens)
        return {
            "engine/busy_share": busy_share,
            "engine/idle_share": 1.0 - busy_share,
            "engine/tokens_per_s": num_tokens / wall_s,
        }


@dataclass(frozen=True, slots=True)
class _Timeline:
    """A thread, or an asyncio task in it."""

    thread: int
    task: asyncio.Task[object] | None

    def __str__(self) -> str:
        name = next((t.name for t in threading.enumerate() if t.ident == self.thread), "ended")
        return f"thread {name!r}" + (f" in task {self.task.get_name()!r}" if self.task else "")


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    category: str
    timeline: _Timeline


def _current_timeline() -> _Timeline:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return _Timeline(threading.get_ident(), task)


def _growth(before: float, after: float) -> float:
    return after - before if after >= before else after  # a restarted engine counts from 0
