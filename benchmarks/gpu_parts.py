"""Parts of a measurement: each is tried, whatever became of the others, while there is time."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MEASURED, FAILED, SKIPPED, INTERRUPTED = "measured", "failed", "skipped", "interrupted"
_NUM_FRAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`kind` names the table it belongs to; with less than `needs_s` seconds left it is skipped."""

    name: str
    kind: str
    needs_s: float
    measure: Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a part: its figures, or why there are none."""

    name: str
    kind: str
    status: str
    seconds: float
    error: str | None = None
    figures: dict[str, Any] | None = None


class Deadline:
    """The end of the time that all parts have together."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    def left_s(self) -> float:
        return self._end - time.monotonic()


def run_parts(
    parts: Sequence[Part],
    deadline: Deadline,
    *,
    before: Callable[[Part], None],
    after: Callable[[list[Outcome]], None],
    on_failure: Callable[[], None],
) -> list[Outcome]:
    """Run the parts in order; Ctrl-C ends one and skips the rest.

    `after` gets all outcomes so far. Then `on_failure` clears up what a failed part has left; what
    it raises is logged.
    """
    outcomes: list[Outcome] = []
    is_interrupted = False
    for part in parts:
        if is_interrupted:
            outcome = _without_figures(part, SKIPPED, "interrupted before its turn")
        else:
            before(part)
            outcome = _run(part, deadline)
            is_interrupted = outcome.status == INTERRUPTED
        outcomes.append(outcome)
        after(outcomes)
        if outcome.status == FAILED:
            try:
                # Only here, where the error with its frames, and all their tensors, is gone.
                on_failure()
            except Exception:  # the later parts are tried all the same
                logger.exception("clearing up after %r failed", part.name)
    return outcomes


def _run(part: Part, deadline: Deadline) -> Outcome:
    left_s = deadline.left_s()
    if left_s < part.needs_s:
        why = f"{max(0.0, left_s):.0f} s were left, it may need {part.needs_s:.0f}"
        return _without_figures(part, SKIPPED, why)
    start = time.monotonic()
    try:
        figures = part.measure()
    except KeyboardInterrupt:
        return _without_figures(part, INTERRUPTED, "Ctrl-C", time.monotonic() - start)
    except Exception as error:  # it is told with the part; the other parts are measured
        return _without_figures(part, FAILED, described(error), time.monotonic() - start)
    seconds = time.monotonic() - start
    return Outcome(
        name=part.name, kind=part.kind, status=MEASURED, seconds=seconds, figures=figures
    )


def _without_figures(part: Part, status: str, why: str, seconds: float = 0.0) -> Outcome:
    return Outcome(name=part.name, kind=part.kind, status=status, seconds=seconds, error=why)


def described(error: BaseException) -> str:
    """Type, message and the innermost frames, without the folders of this machine."""
    frames = traceback.extract_tb(error.__traceback__)[-_NUM_FRAMES:]
    places = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return f"{type(error).__name__}: {error} ({' > '.join(places)})"
