"""Errors of reward functions: their types, their tracebacks, and the warnings in the log, of calls
that take long as well."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rollout.errors import RolloutError

_PACKAGE = __name__.partition(".")[0]
_MAX_SHOWN = 200  # characters of a prompt or completion in a warning
_log = logging.getLogger(__name__)


class RewardFailed(RolloutError):
    """A reward function raised, took too long, or its process died."""


class RewardCallStillRuns(RewardFailed):
    """A call took too long in a thread, which cannot be ended: its function still runs."""


class RewardProcessesClosed(RewardFailed):
    """The processes were closed before a call had its turn; its rewards are not needed any more."""


class RewardFunctionError(RolloutError):
    """A reward function has never succeeded. The cause is its error, with its own traceback."""


class RemoteTraceback(Exception):
    """The traceback of an error in another process; it becomes the cause of the error raised here.

    `place`: what `place_of` returned in that process.
    """

    def __init__(self, text: str, place: str) -> None:
        super().__init__(text, place)
        self.text, self.place = text, place

    def __str__(self) -> str:
        return f"\n{self.text}"

    @classmethod
    def of(cls, error: BaseException) -> RemoteTraceback:
        """The traceback of `error`, with all its causes."""
        return cls("".join(traceback.format_exception(error)), place_of(error))


def place_of(error: BaseException) -> str:
    """The type of `error` and the line that raised it, equal whatever the data was."""
    if isinstance(error.__cause__, RemoteTraceback):
        return error.__cause__.place
    frames = traceback.extract_tb(error.__traceback__)
    line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__} at {line}"


def below_this_package(frames: TracebackType | None) -> TracebackType | None:
    """The part of a traceback below our own last frame; all of it if nothing is below."""
    part, below = frames, frames
    while part is not None:
        if part.tb_frame.f_globals.get("__name__", "").startswith(f"{_PACKAGE}."):
            below = part.tb_next
        part = part.tb_next
    return below or frames


class FailureLog:
    """Logs each distinct error once, with its traceback, and its count at 10, 100, ..."""

    def __init__(self, subject: str) -> None:
        """`subject`: whose errors they are, as "reward function score"."""
        self._subject = subject
        self._counts: Counter[str] = Counter()

    def add(self, error: BaseException) -> None:
        """Count `error`. Errors raised by the same line count as one."""
        place = place_of(error)
        self._counts[place] += 1
        count = self._counts[place]
        if count == 1:
            shown = (type(error), error, below_this_package(error.__traceback__))
            _log.warning("%s failed: %r", self._subject, error, exc_info=shown)
        elif str(count).rstrip("0") == "1":
            _log.warning(
                "%s failed %d times so far with %s, now: %r",
                self._subject,
                count,
                place,
                error,
            )


class SlowCallWarnings:
    """Warns of calls that take long, while they run: one that hangs would hold a run up unseen."""

    def __init__(self, name: str, after_s: float | None) -> None:
        """`name`: of the function. `after_s`: None warns of none."""
        self._name, self._after_s = name, after_s

    @contextmanager
    def watch(self, prompts: Sequence[Any], completions: Sequence[Any]) -> Iterator[None]:
        """In the block, a call of the function, warn after each time that is twice the last."""
        loop, timer = asyncio.get_running_loop(), None

        def warn(elapsed_s: float) -> None:
            nonlocal timer
            _log.warning(
                "reward function %s still runs after %g s; it scores %d completions, the first is "
                "%s to the prompt %s. Its RewardRunner takes a timeout_s (reward.timeout_s)",
                self._name, elapsed_s, len(completions), _shown(completions), _shown(prompts),
            )  # fmt: skip
            timer = loop.call_later(elapsed_s, warn, 2 * elapsed_s)

        if self._after_s is not None:
            timer = loop.call_later(self._after_s, warn, self._after_s)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


def _shown(values: Sequence[Any]) -> str:
    """The first value, cut short."""
    text = repr(values[0]) if len(values) else "none"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
