"""Results of gpu-check: the outcome of each part, the files in $OUT, and the printed summary.

Used by `scripts.gpu_check`. Results writes and deletes the files.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.gpu_processes import Ended, Part, described, lines_of

ROOT = Path(__file__).resolve().parents[1]
NOTHING_TO_RUN = 5  # exit status of pytest, and of the programs under benchmarks/
# All files that a call may write to $OUT.
FILES = (
    *("facts.txt", "check.json", "tests.jsonl", "again.txt", "logs.txt"),
    *("gpu.json", "gpu.md", "gpu-kernels.md"),
)
NUM_FAILURES = 3  # number of failures printed for each part. tests.jsonl has all.
# The lines of ended parts take a tenth of the output, which stays below 12,000 characters.
SUMMARY_CHARACTERS = 10_800
LOG_BYTES = 1 << 20  # size of the kept end of a part's log
# All printed failures share these characters, within the widths below.
FAILURES_CHARACTERS = 6_000
NAME_WIDTH, ERROR_WIDTH = 150, 220
# First lines of stacks as Python, faulthandler and pytest-timeout write them.
STACK = re.compile(r"(?:most recent call |^~+ Stack of )", re.MULTILINE)
FRAME = re.compile(rf'File "{re.escape(str(ROOT))}/(.+?)", line (\d+),? in (\S+)')
ERROR_LINE = re.compile(r"^((\w+\.)*\w*(Error|Exception|Interrupt)\b|what\(\):)")
STACK_LINE = re.compile(r'^(File "|Current thread |Thread |Extension modules: |Fatal Python error)')


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a test failed, or the whole part if `test` is "".

    `frame`: the innermost stack frame in this repository, or "".
    """

    test: str
    error: str
    frame: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a part.

    `status`: "passed", "failed", "timed out" or "nothing to run".
    `num_not_run`: number of tests that were collected and not started.
    `num_compiled`: number of kernels that were compiled because Triton's cache lacked them.
    """

    name: str
    status: str
    seconds: float
    exit_status: int | None
    num_passed: int
    num_failed: int
    num_skipped: int
    num_not_run: int
    num_compiled: int
    failures: list[Failure]

    @property
    def is_good(self) -> bool:
        return self.status in ("passed", "nothing to run")


def outcome_of(part: Part, ended: Ended, journal: Path, log: Path, num_compiled: int) -> Outcome:
    """Return the outcome of a part, from its journal and log.

    If a part failed or timed out without a failed test, its only failure is the result of
    `failure_in`.
    """
    lines = lines_of(journal, part.name)
    events = Counter(line["event"] for line in lines)
    stacks = stacks_in(tail_of(log).decode(errors="replace"))
    failures = [
        Failure(
            test=line["test"],
            error=line["error"],
            frame=line["frame"] or innermost_frame(stacks, line["test"]),
        )
        for line in lines
        if line["event"] == "failed"
    ]
    if ended.is_late:
        status = "timed out"
    elif ended.exit_status == NOTHING_TO_RUN and not events["started"]:
        status = "nothing to run"
    else:
        is_whole = ended.exit_status == 0 and not failures
        status = "passed" if is_whole else "failed"
    if not failures and status in ("failed", "timed out"):
        failures = [failure_in(log, ended)]
    # A process that is started again collects only what is left.
    num_collected = max((int(line["count"]) for line in lines if "count" in line), default=0)
    return Outcome(
        name=part.name,
        status=status,
        seconds=round(ended.seconds, 1),
        exit_status=ended.exit_status,
        num_passed=events["passed"],
        num_failed=events["failed"],
        num_skipped=events["skipped"],
        num_not_run=max(0, num_collected - events["started"]),
        num_compiled=num_compiled,
        failures=failures,
    )


def failure_in(log: Path, ended: Ended) -> Failure:
    """Return a failure of the whole part: how it ended, the last error in its log, and a frame."""
    text = tail_of(log).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not STACK_LINE.match(line)]
    errors = [line for line in lines if ERROR_LINE.match(line)] or lines or ["it printed nothing"]
    how = "it was stopped at its time limit" if ended.is_late else described(ended.exit_status)
    return Failure(
        test="", error=f"{how}: {errors[-1]}", frame=innermost_frame(stacks_in(text)[-1:])
    )


def stacks_in(text: str) -> list[list[str]]:
    """Return this repository's frames of each stack in a log, outermost first."""
    found = []
    for stack in STACK.split(text)[1:]:
        frames = ["{}:{} {}".format(*match) for match in FRAME.findall(stack)]
        if frames:
            found.append(frames[::-1] if stack.startswith("first") else frames)
    return found


def innermost_frame(stacks: Sequence[Sequence[str]], test: str = "") -> str:
    """Return the innermost frame of the first stack (of `test`, if given), or "" without one."""
    function = test.rpartition("::")[2].partition("[")[0]
    for frames in stacks:
        if not test or any(frame.endswith(f" {function}") for frame in frames):
            return frames[-1]
    return ""


def tail_of(log: Path) -> bytes:
    return log.read_bytes()[-LOG_BYTES:] if log.exists() else b""


class Results:
    """Deletes the files of older calls in `out`, and writes this call's files after every part.

    `asked`: node ids of the tests to run. Empty for all tests.
    """

    def __init__(self, out: Path, call: str, asked: Sequence[str]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out, self._call, self._asked = out, call, asked
        self._outcomes: list[Outcome] = []
        self.journal = out / "tests.jsonl"
        for name in FILES:
            (out / name).unlink(missing_ok=True)

    @property
    def are_good(self) -> bool:
        return all(outcome.is_good for outcome in self._outcomes)

    def add(self, outcome: Outcome, log: Path, pages: Sequence[Path]) -> None:
        """Add the outcome of a part: update the files in `out`, and print the part's line."""
        self._outcomes.append(outcome)
        for page in pages:
            if page.is_file():
                shutil.copy(page, self._out)
        if outcome.name == "facts":
            (self._out / "facts.txt").write_bytes(tail_of(log))
        with (self._out / "logs.txt").open("ab") as logs:
            logs.write(f"=== {outcome.name}\n".encode() + tail_of(log) + b"\n")
        content = {"call": self._call, "parts": [asdict(part) for part in self._outcomes]}
        (self._out / "check.json").write_text(json.dumps(content, indent=1) + "\n")
        failures = (failure for part in self._outcomes for failure in part.failures)
        again = "".join(f"{failure.test}\n" for failure in failures if failure.test)
        (self._out / "again.txt").write_text(again, encoding="utf-8")
        print(line_of(outcome), flush=True)

    def summary(self) -> str:
        """Return the summary for the caller, in at most SUMMARY_CHARACTERS."""
        page = self._out / "gpu.md"
        table = page.read_text(encoding="utf-8", errors="replace") if page.exists() else ""
        known = {line.get("test") for line in lines_of(self.journal)}
        unknown = [test for test in self._asked if test and "::" in test and test not in known]
        return summary_of(self._outcomes, unknown, table)


def summary_of(outcomes: Sequence[Outcome], unknown: Sequence[str], table: str) -> str:
    """Return a line for each part, its first failures, and as much of the table as fits.

    `unknown`: requested tests that did not start.
    `table`: the benchmark's page, gpu.md.
    """
    lines = ["", "=== summary", *map(line_of, outcomes)]
    num_shown = sum(min(len(outcome.failures), NUM_FAILURES) for outcome in outcomes)
    for outcome in outcomes:
        lines += failure_lines(outcome, FAILURES_CHARACTERS // max(1, num_shown))
    if unknown:
        lines.append(
            f"--- {len(unknown)} tests were asked for and did not start; are they renamed?"
        )
        lines += [f"    {shortened(test, NAME_WIDTH)}" for test in unknown[:NUM_FAILURES]]
    text = "\n".join(lines) + "\n\n"
    left = SUMMARY_CHARACTERS - len(text)
    return text + first_lines(table.strip(), left)


def line_of(outcome: Outcome) -> str:
    """Return the part's name, status, seconds and counts in less than 120 characters."""
    counts = {
        "passed": outcome.num_passed,
        "failed": outcome.num_failed,
        "skipped": outcome.num_skipped,
        "not run": outcome.num_not_run,
        "compiled": outcome.num_compiled,
    }
    if not any(counts.values()):
        counts = {}
    parts = [f"{outcome.seconds:.1f} s", *(f"{count} {what}" for what, count in counts.items())]
    return f"{outcome.name:<12} {outcome.status:<14} {', '.join(parts)}"


def failure_lines(outcome: Outcome, num_characters: int) -> list[str]:
    """Return lines for the first failures of a part, about `num_characters` for each failure."""
    name_width = min(NAME_WIDTH, num_characters * 3 // 10)
    error_width = min(ERROR_WIDTH, num_characters * 4 // 10)
    lines = []
    for failure in outcome.failures[:NUM_FAILURES]:
        lines.append(f"--- {outcome.name}: {shortened(failure.test, name_width)}")
        lines.append(f"    {shortened(failure.error, error_width)}")
        if failure.frame:
            lines.append(f"    at {shortened(failure.frame, name_width)}")
    if len(outcome.failures) > NUM_FAILURES:
        lines.append(
            f"--- {outcome.name}: {len(outcome.failures) - NUM_FAILURES} more in tests.jsonl"
        )
    return lines


def shortened(text: str, width: int) -> str:
    """Return `text` as one line of at most `width` characters. A longer text loses its middle."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    end = (width - 5) // 2
    return f"{line[: width - 5 - end]} ... {line[-end:]}"


def first_lines(text: str, num_characters: int) -> str:
    """Return the first lines of `text` that fit, and a line with the number of lines left out."""
    lines = text.splitlines()
    kept = 0
    room = num_characters - len("(1000000 more lines in gpu.md)")
    while kept < len(lines) and len(lines[kept]) + 1 <= room:
        room -= len(lines[kept]) + 1
        kept += 1
    if kept < len(lines):
        lines[kept:] = [f"({len(lines) - kept} more lines in gpu.md)"]
    return "\n".join(lines)
