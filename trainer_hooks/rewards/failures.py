"""Errors of reward functions, and log messages about these errors and about slow calls.

Used by the modules `adapters`, `process`, `processes` and `runner` of `trainer_hooks.rewards`.
`trainer_hooks.producer.groups` and `trainer_hooks.evaluation` catch RewardFailed.
`trainer_hooks.train.hydra_job` catches RewardFunctionError. `trainer_hooks.environments.faults`
uses FailureLog. `trainer_hooks.producer.group_pool` and `trainer_hooks.producer.groups` use the
helper functions.
"""

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
    """A reward function raised an error or took too long, or its process died."""


class RewardCallStillRuns(RewardFailed):
    """A call took too long in a thread, where it still runs because a thread cannot be ended."""


class RewardProcessesClosed(RewardFailed):
    """The processes were closed while a call was waiting for a free process."""


class RewardFunctionError(RolloutError):
    """A reward function has never succeeded. The cause is the function's own error."""


class RemoteTraceback(Exception):
    """The traceback of an error in another process, as text.

    `raised_at`: result of the function `raised_at` in that process.
    """

    def __init__(self, text: str, raised_at: str) -> None:
        super().__init__(text, raised_at)
        self.text, self.raised_at = text, raised_at

    def __str__(self) -> str:
        return f"\n{self.text}"

    @classmethod
    def of(cls, error: BaseException) -> RemoteTraceback:
        """Return the traceback of `error`, with the tracebacks of all its causes."""
        return cls("".join(traceback.format_exception(error)), raised_at(error))


def raised_at(error: BaseException) -> str:
    """Return the type of `error` and the line that raised it, as text without the message."""
    if isinstance(error.__cause__, RemoteTraceback):
        return error.__cause__.raised_at
    frames = traceback.extract_tb(error.__traceback__)
    line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__} at {line}"


def below_this_package(frames: TracebackType | None) -> TracebackType | None:
    """Return the frames below the last frame of this package, or all frames without any below."""
    part, below = frames, frames
    while part is not None:
        if part.tb_frame.f_globals.get("__name__", "").startswith(f"{_PACKAGE}."):
            below = part.tb_next
        part = part.tb_next
    return below or frames


def is_power_of_ten(count: int) -> bool:
    """Return whether `count` is 1, 10, 100, ..., so that a log of repeated failures stays short."""
    return str(count).rstrip("0") == "1"


class FailureLog:
    """Logs each distinct error with its traceback the first time, then its count at 10, 100, ...

    `subject`: text that names the failing function, such as "reward function score".
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._counts: Counter[str] = Counter()

    def add(self, error: BaseException) -> None:
        """Count `error` and log it if due. Errors of one type from one line count as one error."""
        place = raised_at(error)
        self._counts[place] += 1
        count = self._counts[place]
        if count == 1:
            shown = (type(error), error, below_this_package(error.__traceback__))
            _log.warning("%s failed: %r", self._subject, error, exc_info=shown)
        elif is_power_of_ten(count):
            _log.warning(
                "%s failed %d times so far with %s, now: %r",
                self._subject,
                count,
                place,
                error,
            )


class SlowCallWarnings:
    """Logs a warning when a call has run for `after_s` seconds. None logs no warnings.

    `name`: name of the reward function.
    """

    def __init__(self, name: str, after_s: float | None) -> None:
        self._name, self._after_s = name, after_s

    @contextmanager
    def watch(self, prompts: Sequence[Any], completions: Sequence[Any]) -> Iterator[None]:
        """Return a context for a call of the function, in which warnings are logged.

        The first warning comes after `after_s` seconds, and others at each doubled time. Warnings
        show the first sample.
        """
        loop, timer = asyncio.get_running_loop(), None

        def warn(elapsed_s: float) -> None:
            nonlocal timer
            _log.warning(
                "reward function %s still runs after %g s; it scores %d completions, the first is "
                "%s to the prompt %s. RewardRunner's timeout_s (reward.timeout_s) limits a call",
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
    text = repr(values[0]) if len(values) else "none"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
