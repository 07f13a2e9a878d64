"""Run the parts of a measurement within a deadline, also after one of them has failed or hung.

Used by `benchmarks.gpu`. Each group of parts runs in a child process, which reports each part as it
begins and ends. If a child crashes or hangs, its current part fails, and a new child runs the
remaining parts.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.child_process import ChildProcess, end_of, pickled
from rollout.errors import decode_error

logger = logging.getLogger(__name__)

MEASURED, FAILED, SKIPPED, INTERRUPTED = "measured", "failed", "skipped", "interrupted"
START_LIMIT_S = 120.0  # from a child's start to its first part: imports and the CUDA context
HANG_S = 10.0  # added to three times the seconds that a part may need
KILL_LIMIT_S = 20.0  # for a killed child to end: page-locked memory is released meanwhile
_NUM_FRAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One measurement.

    kind: kind of measurement, such as "decode". Each kind has its own table.
    needs_s: seconds that the part may need. The part is skipped if fewer seconds are left.
    """

    name: str
    kind: str
    needs_s: float
    measure: Callable[[], dict[str, Any]]

    @property
    def limit_s(self) -> float:
        """Seconds after which the part counts as hanging and its process is killed."""
        return HANG_S + 3 * self.needs_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a part: its figures, or in `error` the reason why there are no figures.

    status: MEASURED, FAILED, SKIPPED or INTERRUPTED.
    seconds: duration of the part.
    """

    name: str
    kind: str
    status: str
    seconds: float
    error: str | None = None
    figures: dict[str, Any] | None = None


class Deadline:
    """Time by which all parts must end, by time.monotonic. Other processes have the same clock."""

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at

    @classmethod
    def after(cls, budget_s: float) -> Deadline:
        return cls(time.monotonic() + budget_s)

    def left_s(self) -> float:
        return self.ends_at - time.monotonic()


def described(error: BaseException) -> str:
    """Return the type, message and innermost stack frames of an error, without folder names."""
    frames = traceback.extract_tb(error.__traceback__)[-_NUM_FRAMES:]
    places = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return f"{type(error).__name__}: {error} ({' > '.join(places)})"


def _without_figures(part: Part, status: str, why: str, seconds: float = 0.0) -> Outcome:
    return Outcome(name=part.name, kind=part.kind, status=status, seconds=seconds, error=why)


# ---- in the process of a group

BEGIN, END = "begin", "end"
Report = tuple[str, Any]  # BEGIN and a name, END and an Outcome, or anything else and its value


def run_parts(
    parts: Sequence[Part],
    deadline: Deadline,
    *,
    report: Callable[[Report], None],
    recover: Callable[[], None],
) -> None:
    """Run the parts in order, and report the beginning and the outcome of each part.

    Calls `recover` after a part that failed. If `recover` raises, the remaining parts are not run
    and have no outcome.
    """
    for part in parts:
        left_s = deadline.left_s()
        if left_s < part.needs_s:
            report((END, _out_of_time(part, left_s)))
            continue
        report((BEGIN, part.name))
        outcome = _run(part)
        report((END, outcome))
        if outcome.status == FAILED:
            try:
                # Not within `_run`, where the error's frames still hold tensors.
                recover()
            except Exception:
                logger.exception("the device does not recover from %r", part.name)
                return


def _run(part: Part) -> Outcome:
    start = time.monotonic()
    try:
        figures = part.measure()
    except Exception as error:  # reported as the part's outcome; the other parts run
        return _without_figures(part, FAILED, described(error), time.monotonic() - start)
    seconds = time.monotonic() - start
    return Outcome(
        name=part.name, kind=part.kind, status=MEASURED, seconds=seconds, figures=figures
    )


def _out_of_time(part: Part, left_s: float) -> Outcome:
    why = f"{max(0.0, left_s):.0f} s were left, it may need {part.needs_s:.0f}"
    return _without_figures(part, SKIPPED, why)


# ---- in the process that starts them


class GroupRunner:
    """Runs each group of parts in a child process, and collects the outcomes in order."""

    def __init__(
        self,
        module: str,
        deadline: Deadline,
        *,
        arguments: Callable[[str, list[str]], Sequence[Any]],
        before: Callable[[str], None],
        after: Callable[[Outcome], None],
        others: Callable[[Report], None],
    ) -> None:
        """`module` is the main module of each child, and calls `run_child`.

        `arguments` returns what is sent to a child, for a group and the names of its parts.
        `before` receives the name of each part that begins. `after` receives each outcome. `others`
        receives every other report of a child.
        """
        self._module, self._deadline, self._arguments = module, deadline, arguments
        self._before, self._after, self._others = before, after, others
        self._reserve: ChildProcess | None = None

    def run(self, groups: Mapping[str, Sequence[Part]]) -> None:
        """Run all groups, so that every part has an outcome. Ctrl-C ends one part and skips the
        rest."""
        left = {group: list(parts) for group, parts in groups.items()}
        names = list(groups)
        try:
            for group in names:
                while left[group] and not self._skips(left[group]):
                    child = self._take_child(has_more=group != names[-1])
                    try:
                        self._run_in(child, group, left[group])
                    finally:
                        _end(child)
        except KeyboardInterrupt:
            for parts in left.values():
                while parts:
                    self._settle(parts, parts[0], SKIPPED, "interrupted before its turn")
        finally:
            if self._reserve is not None:
                _end(self._reserve)

    def _skips(self, parts: list[Part]) -> bool:
        """Skip all parts and return True if no part has enough time left, else return False."""
        left_s = self._deadline.left_s()
        if any(part.needs_s <= left_s for part in parts):
            return False
        while parts:
            self._after(_out_of_time(parts.pop(0), left_s))
        return True

    def _take_child(self, *, has_more: bool) -> ChildProcess:
        """Return a new child, or the one in reserve. Starts a reserve if `has_more`."""
        # The reserve imports its modules while the current group is measured.
        child, self._reserve = self._reserve or ChildProcess(self._module), None
        if has_more:
            self._reserve = ChildProcess(self._module)
        return child

    def _run_in(self, child: ChildProcess, group: str, left: list[Part]) -> None:
        """Run parts of a group in a child until the child ends or all parts have an outcome.

        Removes each part that gets an outcome from `left`, at least one.
        """
        by_name = {part.name: part for part in left}
        arguments = self._arguments(group, list(by_name))
        # A child that has ended is detected below.
        with contextlib.suppress(OSError):
            child.send(*(pickled(argument, "an argument of a group") for argument in arguments))
        current: Part | None = None
        has_begun, start, limit_s = False, time.monotonic(), START_LIMIT_S
        try:
            while left:
                report = _next_report(child, start + limit_s - time.monotonic())
                if isinstance(report, str):
                    unmeasured = [current] if current else [] if has_begun else list(left)
                    for part in unmeasured:
                        self._settle(left, part, FAILED, report, time.monotonic() - start)
                    return
                what, value = report
                if what == BEGIN:
                    current, has_begun = by_name[value], True
                    start, limit_s = time.monotonic(), current.limit_s
                    self._before(value)
                elif what == END:
                    left.remove(by_name[value.name])
                    current, has_begun = None, True
                    start, limit_s = time.monotonic(), START_LIMIT_S
                    self._after(value)
                else:
                    self._others(report)
        except KeyboardInterrupt:
            if current is not None and current in left:
                self._settle(left, current, INTERRUPTED, "Ctrl-C", time.monotonic() - start)
            raise

    def _settle(
        self, left: list[Part], part: Part, status: str, why: str, seconds: float = 0.0
    ) -> None:
        """Remove a part from `left`, and report an outcome without figures."""
        left.remove(part)
        self._after(_without_figures(part, status, why, seconds))


def _next_report(child: ChildProcess, timeout_s: float) -> Report | str:
    """Return the child's next report, or as text the reason why no report follows."""
    if not child.pipe.poll(max(0.0, timeout_s)):
        child.kill()
        return "it did not end in time, and was killed"
    try:
        word = child.pipe.recv()
    except (EOFError, OSError):
        return f"its process ended: {_how_it_ended(child)}"
    if isinstance(word, dict):
        error = decode_error(word)
        return f"{type(error).__name__}: {error}"
    report: Report = word
    return report


def _how_it_ended(child: ChildProcess) -> str:
    """Wait for the end of a child that has closed its pipe, and return a text about its end."""
    try:
        return end_of(child.wait(KILL_LIMIT_S))
    except subprocess.TimeoutExpired:
        return "it closed its pipe, but did not end"


def _end(child: ChildProcess) -> None:
    """Kill a child and wait for its end."""
    child.kill()
    child.pipe.close()
    try:  # the next child needs this child's device memory
        child.wait(KILL_LIMIT_S)
    except subprocess.TimeoutExpired:
        logger.error("%s does not end", child.name)
