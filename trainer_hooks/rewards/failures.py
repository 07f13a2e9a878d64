"""Errors of reward functions: their types, their tracebacks, and the warnings in the log."""

from __future__ import annotations

import logging
import traceback
from collections import Counter

from rollout.errors import RolloutError

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


class FailureLog:
    """Logs each distinct error once, with its traceback, and its count at 10, 100, ..."""

    def __init__(self, function_name: str) -> None:
        self._name = function_name
        self._counts: Counter[str] = Counter()

    def add(self, error: BaseException) -> None:
        """Count `error`. Errors raised by the same line count as one."""
        place = place_of(error)
        self._counts[place] += 1
        count = self._counts[place]
        if count == 1:
            _log.warning("reward function %s failed: %r", self._name, error, exc_info=error)
        elif str(count).rstrip("0") == "1":
            _log.warning(
                "reward function %s failed %d times so far with %s, now: %r",
                self._name,
                count,
                place,
                error,
            )
