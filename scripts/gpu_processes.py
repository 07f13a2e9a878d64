"""Runner: runs each part of gpu-check as a process group with a time limit, and ends it in time.

Used by `scripts.gpu_check` and `scripts.gpu_results`. Parts write logs. Their tests write a
journal: tests/device_journal.py appends the start and the result of each test to it as a line of
JSON.
"""

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

GRACE_S = 5.0  # from SIGINT to SIGABRT, while pytest and the benchmark print a summary
ABORT_S = 1.0  # from SIGABRT to SIGKILL, while faulthandler writes the stacks
REAP_S = 1.0  # from SIGKILL to the end of the process, which a driver may delay
TOKEN = "ROLLOUT_GPU_CHECK"  # environment variable that a part's processes inherit
# Variables that tests/device_journal.py reads.
JOURNAL, PART = "ROLLOUT_TEST_JOURNAL", "ROLLOUT_TEST_PART"
ONLY, EXCEPT = "ROLLOUT_TEST_ONLY", "ROLLOUT_TEST_EXCEPT"
STACKS = ".stacks-"  # between the journal's name and the id of a process that writes its stacks


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command of the check and its time limit, which includes ending its processes.

    `has_tests`: True if the command runs pytest, whose tests write the journal.
    `only`: file of the node ids of the tests to run. None runs all.
    `pages`: files that the command leaves in its $OUT.
    `takes_spare_time`: True if the limit grows by the time that earlier parts did not use.
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
    """How a part's last process ended.

    `exit_status`: negative for a signal, None if the process could not be ended.
    `is_late`: True if the time limit was reached.
    `seconds`: duration of the part.
    """

    exit_status: int | None
    is_late: bool
    seconds: float


class Clock:
    """Measures and waits in real time. Tests replace it."""

    def now(self) -> float:
        return time.monotonic()

    def ended_within(self, process: subprocess.Popen[bytes], seconds: float) -> bool:
        """Wait for the process. Returns False if it still runs after `seconds`."""
        try:
            process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_for_stacks(self, process: subprocess.Popen[bytes]) -> None:
        """Wait, at most ABORT_S, until the group has written its stacks after SIGABRT and ended."""
        wait_for_group(process, ABORT_S)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs parts in the directory `root`.

    `folder`: folder of the parts' logs and lists of tests.
    `journal`: file to which tests append.
    """

    root: Path
    folder: Path
    journal: Path
    environment: Mapping[str, str]
    clock: Clock = field(default_factory=Clock)

    def log_of(self, part: Part) -> Path:
        return self.folder / f"{part.name.replace(' ', '-')}.log"

    def run(self, part: Part) -> Ended:
        """Run the part's command. If a process of tests ends early, run the tests not started yet.

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
                # If no further test was started, the next process would end early, too.
                if not part.has_tests or is_late or is_whole or len(started) <= num_started:
                    seconds = self.clock.now() - start
                    return Ended(exit_status=exit_status, is_late=is_late, seconds=seconds)
                num_started = len(started)
                self._except_list(part).write_text("\n".join(started), encoding="utf-8")

    def _run_once(self, part: Part, log: IO[bytes], end: float) -> tuple[bool, int | None]:
        """Run the command until `end` at most. Returns whether it was late, and its exit status."""
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
        """Return the environment variables that tests/device_journal.py reads."""
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
        """Append a failure to the journal for each test that was started and did not end."""
        ended = {line.get("test") for line in lines if line["event"] != "started"}
        why = "still running at the part's time limit" if is_late else described(exit_status)
        with self.journal.open("a", encoding="utf-8") as journal:
            for line in lines:
                if line["event"] == "started" and line["test"] not in ended:
                    failed = {"event": "failed", "test": line["test"], "error": why, "frame": ""}
                    journal.write(json.dumps({"part": part.name, **failed}) + "\n")


def wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def wait_for_group(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the end of all processes of the process's group, at most `seconds`."""
    end = time.monotonic() + seconds
    wait(process, seconds)
    while time.monotonic() < end:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)


def kill(group: int, token: str) -> None:
    """Kill the process group, and all processes with the token in their environment."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    mark = f"{TOKEN}={token}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
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
    """Return the journal's lines of `part`, or all lines if None. Skips lines cut by a kill."""
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
