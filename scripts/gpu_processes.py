"""The time limits of gpu-check: a part is a process group that ends in time, with its children."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

GRACE_S = 5.0  # from Ctrl-C, on which pytest and the benchmark sum up, to the next
ABORT_S = 1.0  # from the abort, on which faulthandler writes where Python hangs, to the kill
REAP_S = 1.0  # from the kill to the end of the process, which a driver may hold up
TOKEN = "ROLLOUT_GPU_CHECK"  # environment variable that a part's processes inherit
# Variables that tests/device_journal.py reads.
JOURNAL, PART = "ROLLOUT_TEST_JOURNAL", "ROLLOUT_TEST_PART"
ONLY, EXCEPT = "ROLLOUT_TEST_ONLY", "ROLLOUT_TEST_EXCEPT"
STACKS = ".stacks-"  # between the journal's name and the id of a process that writes its stacks


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command of the check and its time limit, which includes ending its processes.

    has_tests: it is pytest's, and writes the journal. only: node ids of the tests that it runs.
    pages: files that it leaves in $OUT. takes_spare_time: its limit grows by what others left.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    has_tests: bool = False
    only: Path | None = None
    pages: Sequence[str] = ()
    takes_spare_time: bool = False


@dataclass(frozen=True, kw_only=True)
class Ended:
    """End of a part's last process; `exit_status` is None if it could not be reaped."""

    exit_status: int | None
    is_late: bool
    seconds: float


class Clock:
    """Waits in real time."""

    def now(self) -> float:
        return time.monotonic()

    def ended_within(self, process: subprocess.Popen[bytes], seconds: float) -> bool:
        """Wait for the process. Returns False if it still runs after so many seconds."""
        try:
            process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_for_stacks(self, process: subprocess.Popen[bytes]) -> None:
        """Wait after an abort until the process and its group have written their stacks and ended,
        at most ABORT_S."""
        wait_for_group(process, ABORT_S)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs parts in `root`. `folder` holds their logs and lists, `journal` what tests write."""

    root: Path
    folder: Path
    journal: Path
    environment: Mapping[str, str]
    clock: Clock = field(default_factory=Clock)

    def log_of(self, part: Part) -> Path:
        return self.folder / f"{part.name.replace(' ', '-')}.log"

    def run(self, part: Part) -> Ended:
        """Run the part's command; after a process that ended early, run the tests that are left.

        A test that was running when its process ended is written to the journal as failed.
        """
        start = self.clock.now()
        end = start + part.limit_s - GRACE_S - ABORT_S - REAP_S
        num_started = 0
        with self.log_of(part).open("wb") as log:
            while True:
                is_late, exit_status = self._run_once(part, log, end)
                lines = lines_of(self.journal, part.name)
                self._write_unfinished(part, lines, is_late, exit_status)
                started = [line["test"] for line in lines if line["event"] == "started"]
                is_whole = any(line["event"] == "finished" for line in lines)
                # Without a test more than before it would end early again.
                if not part.has_tests or is_late or is_whole or len(started) <= num_started:
                    seconds = self.clock.now() - start
                    return Ended(exit_status=exit_status, is_late=is_late, seconds=seconds)
                num_started = len(started)
                self._except_list(part).write_text("\n".join(started), encoding="utf-8")

    def _run_once(self, part: Part, log: IO[bytes], end: float) -> tuple[bool, int | None]:
        """Returns whether the time was over, and the exit status."""
        token = uuid.uuid4().hex
        process = subprocess.Popen(
            part.command,
            cwd=self.root,
            env={**self.environment, **self._lists(part), TOKEN: token},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            is_late = not self.clock.ended_within(process, end - self.clock.now())
            if is_late:
                process.send_signal(signal.SIGINT)
                if not self.clock.ended_within(process, GRACE_S):
                    os.killpg(process.pid, signal.SIGABRT)
                    self.clock.wait_for_stacks(process)
        finally:
            kill(process.pid, token)
        wait(process, REAP_S)
        for stacks in sorted(self.journal.parent.glob(f"{self.journal.name}{STACKS}*")):
            log.write(stacks.read_bytes())
            stacks.unlink()
        return is_late, process.returncode

    def _lists(self, part: Part) -> dict[str, str]:
        """The variables that tell pytest what to run and where to write."""
        if not part.has_tests:
            return {}
        variables = {JOURNAL: str(self.journal), PART: part.name}
        if part.only is not None:
            variables[ONLY] = str(part.only)
        if self._except_list(part).exists():
            variables[EXCEPT] = str(self._except_list(part))
        return variables

    def _except_list(self, part: Part) -> Path:
        return self.log_of(part).with_suffix(".started")

    def _write_unfinished(
        self, part: Part, lines: Sequence[dict[str, str]], is_late: bool, exit_status: int | None
    ) -> None:
        ended = {line.get("test") for line in lines if line["event"] != "started"}
        why = "still running at the part's time limit" if is_late else described(exit_status)
        with self.journal.open("a", encoding="utf-8") as journal:
            for line in lines:
                if line["event"] == "started" and line["test"] not in ended:
                    failed = {"event": "failed", "test": line["test"], "error": why, "frame": ""}
                    journal.write(json.dumps({"part": part.name, **failed}) + "\n")


def wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Give the process this long to end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def wait_for_group(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Give the process and all others of its process group this long to end."""
    end = time.monotonic() + seconds
    wait(process, seconds)
    while time.monotonic() < end:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)


def kill(group: int, token: str) -> None:
    """Kill the process group, and what has left it: all that has the token in its environment."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    mark = f"{TOKEN}={token}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def described(exit_status: int | None) -> str:
    """Return in words how a process ended."""
    if exit_status is None:
        return "its process could not be ended"
    if exit_status < 0:
        return f"its process ended by {signal.Signals(-exit_status).name}"
    return f"its process ended with exit status {exit_status}"


def lines_of(journal: Path, part: str | None = None) -> list[dict[str, str]]:
    """Return the journal's lines, of all parts or of `part`, without a line that a kill cut."""
    lines = []
    if journal.exists():
        for text in journal.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if part in (None, line["part"]):
                lines.append(line)
    return lines
