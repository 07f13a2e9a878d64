"""Runner: a part ends in time with all that it started; tests go on after one that aborts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import gpu_processes
from scripts.gpu_processes import (
    ABORT_S,
    GRACE_S,
    REAP_S,
    Clock,
    Ended,
    Part,
    Runner,
    lines_of,
    wait_for_group,
)

DEAF = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"


class PatientClock(Clock):
    """Time is over once the part has printed "ready", and not before."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.waits: list[float] = []

    def ended_within(self, process: object, seconds: float) -> bool:
        self.waits.append(seconds)
        if len(self.waits) > 1:  # to sum up
            return super().ended_within(process, seconds)  # type: ignore[arg-type]
        while b"ready" not in (self._log.read_bytes() if self._log.exists() else b""):
            assert process.poll() is None, self._log.read_text()  # type: ignore[attr-defined]
            time.sleep(0.02)
        return False

    def wait_for_stacks(self, process: subprocess.Popen[bytes]) -> None:
        wait_for_group(process, 60.0)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(
        root=tmp_path,
        folder=tmp_path,
        journal=tmp_path / "tests.jsonl",
        environment={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
        clock=PatientClock(tmp_path / "part.log"),
    )


def program(text: str, **fields: object) -> Part:
    command = [sys.executable, "-c", text]
    return Part(name="part", command=command, limit_s=60.0, **fields)  # type: ignore[arg-type]


def log_of(runner: Runner) -> str:
    return (runner.folder / "part.log").read_text()


def in_real_time(runner: Runner) -> Runner:
    return Runner(
        root=runner.root,
        folder=runner.folder,
        journal=runner.journal,
        environment=runner.environment,
    )


def run(runner: Runner, part: Part) -> Ended:
    return in_real_time(runner).run(part)


@pytest.mark.parametrize("status", [0, 1, 5])
def test_a_part_that_ends_is_told_by_its_exit_status(runner: Runner, status: int) -> None:
    ended = run(runner, program(f"print('one'); raise SystemExit({status})"))
    assert (ended.exit_status, ended.is_late, log_of(runner)) == (status, False, "one\n")


def test_a_limit_holds_the_time_to_sum_up_and_to_end(runner: Runner) -> None:
    run_of = Runner(**{name: getattr(runner, name) for name in Runner.__dataclass_fields__})
    clock = run_of.clock
    assert isinstance(clock, PatientClock)
    run_of.run(program("import time\nprint('ready')\ntime.sleep(600)"))
    assert clock.waits[0] == pytest.approx(60.0 - GRACE_S - ABORT_S - REAP_S, abs=2.0)
    assert clock.waits[0] <= 60.0 - GRACE_S - ABORT_S - REAP_S
    assert clock.waits[1:] == [GRACE_S]


def test_a_part_that_takes_too_long_may_sum_up(runner: Runner) -> None:
    text = """
import time
try:
    print("ready")
    time.sleep(600)
except KeyboardInterrupt:
    print("summed up")
"""
    ended = runner.run(program(text))
    assert (ended.exit_status, ended.is_late) == (0, True)
    assert log_of(runner) == "ready\nsummed up\n"


def test_a_part_that_does_not_end_is_killed_and_its_log_says_where_it_hung(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_processes, "GRACE_S", 0.1)
    ended = runner.run(program(DEAF + "print('ready')\ndef stuck(): time.sleep(600)\nstuck()"))
    assert ended.is_late
    assert ended.exit_status in (-6, -9)
    assert "in stuck" in log_of(runner)


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """A file of processes that must be gone in the end."""
    path = tmp_path / "pids"
    yield path
    for pid in path.read_text().split():
        stat = Path("/proc", pid, "stat")
        deadline = time.monotonic() + 60
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
            assert time.monotonic() < deadline, "a child lives on"
            time.sleep(0.02)


@pytest.mark.parametrize("is_late", [True, False])
def test_children_end_with_their_part_also_in_sessions_of_their_own(
    runner: Runner, pids: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    monkeypatch.setattr(gpu_processes, "GRACE_S", 0.1)
    monkeypatch.setattr(gpu_processes, "ABORT_S", 0.1)
    text = f"""
import subprocess, sys
{DEAF}
child = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(child, start_new_session=own) for own in (True, False)]
open({str(pids)!r}, "w").write(" ".join(str(child.pid) for child in children))
print("ready")
time.sleep(600 if {is_late} else 0)
"""
    ended = runner.run(program(text)) if is_late else run(runner, program(text))
    assert ended.is_late == is_late


TESTS = """
import json, os, sys
part, known = os.environ["ROLLOUT_TEST_PART"], os.environ.get("ROLLOUT_TEST_EXCEPT", os.devnull)
def write(event, **fields):
    with open(os.environ["ROLLOUT_TEST_JOURNAL"], "a") as journal:
        journal.write(json.dumps({"part": part, "event": event, **fields}) + "\\n")
before = open(known).read().split()
for test in ["a", "b", "c", "d"]:
    if test not in before:
        write("started", test=test)
        if test in %r:
            os.abort()
        write("passed", test=test)
write("finished")
"""


@pytest.mark.parametrize("bad", ["", "a", "d", "bc", "abcd"])
def test_a_run_of_tests_goes_on_after_each_that_ends_its_process(runner: Runner, bad: str) -> None:
    ended = run(runner, program(TESTS % bad, has_tests=True))
    lines = lines_of(runner.journal)
    events = {line["test"]: line["event"] for line in lines if "test" in line}
    assert events == {test: "failed" if test in bad else "passed" for test in "abcd"}
    assert {line["error"] for line in lines if line["event"] == "failed"} <= {
        "its process ended by SIGABRT"
    }
    assert ended.exit_status == 0 or bad.endswith("d")


def test_a_run_that_ends_before_its_first_test_is_not_tried_for_ever(runner: Runner) -> None:
    text = "print('begun'); raise SystemExit(4)"
    ended = run(runner, program(text, has_tests=True))
    assert (ended.exit_status, log_of(runner)) == (4, "begun\n")


def test_the_tests_that_run_when_time_is_over_have_failed(runner: Runner) -> None:
    text = (TESTS % "").replace('write("passed"', 'print("ready"); import time; time.sleep(600)#')
    assert runner.run(program(text, has_tests=True)).is_late
    (line,) = [line for line in lines_of(runner.journal) if line["event"] == "failed"]
    assert (line["test"], line["error"]) == ("a", "still running at the part's time limit")


def test_a_line_that_a_kill_has_cut_is_left_out(tmp_path: Path) -> None:
    journal = tmp_path / "tests.jsonl"
    line = '{"part": "kernels", "event": "started", "test": "a"}\n'
    journal.write_text(line + line[:20])
    assert lines_of(journal) == [{"part": "kernels", "event": "started", "test": "a"}]
    assert lines_of(journal, "scenarios") == lines_of(tmp_path / "none") == []
