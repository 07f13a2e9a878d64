"""What becomes of a reward function's errors: their types, their tracebacks and the warnings."""

from __future__ import annotations

import logging
import traceback
from collections import Counter

from rollout.errors import RolloutError

_log = logging.getLogger(__name__)


class RewardFailed(RolloutError):
    """A reward function raised, took too long, or its process died."""


class RewardCallGoesOn(RewardFailed):
    """A call took too long in a thread, which cannot be ended: its function still runs."""


class RewardProcessesClosed(RewardFailed):
    """The processes were closed before a call had its turn: nobody wants its rewards any more."""


class RewardFunctionError(RolloutError):
    """A reward function has never succeeded. The cause is its error, with its own traceback."""


class RemoteTraceback(Exception):
    """The traceback of an error that was raised in another process, to be the cause of one here.

    `place`: as `place_of` gives it there.
    """

    def __init__(self, text: str, place: str) -> None:
        super().__init__(text, place)
        self.text, self.place = text, place

    def __str__(self) -> str:
        return f"\n{self.text}"

    @classmethod
    def of(cls, error: BaseException) -> RemoteTraceback:
        """That of `error`, with all its causes."""
        return cls("".join(traceback.format_exception(error)), place_of(error))


def place_of(error: BaseException) -> str:
    """The type of `error` and the line that raised it: equal for the same fault in other data."""
    if isinstance(error.__cause__, RemoteTraceback):
        return error.__cause__.place
    frames = traceback.extract_tb(error.__traceback__)
    line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__} at {line}"


class FailureLog:
    """Warns of each distinct error once, with its traceback; of its count at 10, 100, ..."""

    def __init__(self, function_name: str) -> None:
        self._name = function_name
        self._counts: Counter[str] = Counter()

    def add(self, error: BaseException) -> None:
        """The function failed with `error`. Errors raised by the same line count as one."""
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
