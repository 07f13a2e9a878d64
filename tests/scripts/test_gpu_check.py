"""gpu-check: what it refuses, and that one bad part costs no other its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from scripts import gpu_check
from scripts.gpu_check import Outcome, Part, environment_with, pytest_parts, run_all, run_part

MARK = "@pytest.mark" + ".gpu"  # in two pieces: this file is searched for it as well
SCRIPT = gpu_check.ROOT / "scripts" / "gpu_check.py"


def python(name: str, program: str, limit_s: float = 60.0) -> Part:
    return Part(name=name, command=[sys.executable, "-u", "-c", program], limit_s=limit_s)


def run(part: Part) -> Outcome:
    return run_part(part, dict(os.environ))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_machine_without_a_device_is_refused_in_one_line() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"gpu-check: torch {torch.__version__} sees no CUDA device\n"


def test_a_python_without_torch_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('none here')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr == f"gpu-check: torch is not installed for {sys.executable}\n"


def test_an_empty_bundle_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    missing = gpu_check.what_is_missing(tmp_path)
    assert missing is not None
    assert "make gpu-bundle" in missing
    (tmp_path / "a-1-py3-none-any.whl").touch()
    assert gpu_check.what_is_missing(tmp_path) is None


def test_a_part_passes_its_output_on(capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run(python("good", "import sys; print('one'); print('two', file=sys.stderr)"))
    assert (outcome.status, outcome.exit_status) == ("passed", 0)
    assert outcome.last_lines == ["one", "two"]
    assert "one\ntwo\n" in capfd.readouterr().out


@pytest.mark.parametrize(("exit_status", "status"), [(1, "failed"), (5, "nothing to run")])
def test_an_exit_status_says_how_a_part_ended(exit_status: int, status: str) -> None:
    outcome = run(python("a", f"raise SystemExit({exit_status})"))
    assert (outcome.status, outcome.is_good) == (status, exit_status == 5)


def test_a_part_that_takes_too_long_may_sum_up() -> None:
    program = """
import time
print("begun")
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("summed up")
"""
    outcome = run(python("slow", program, limit_s=2.0))
    assert outcome.status == "timed out"
    assert outcome.last_lines == ["begun", "summed up"]
    assert outcome.seconds < 30


def test_a_part_that_does_not_end_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.5)
    program = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid)
time.sleep(60)
"""
    outcome = run(python("deaf", program, limit_s=2.0))
    assert (outcome.status, outcome.exit_status) == ("timed out", -9)
    child = Path("/proc", outcome.last_lines[0], "stat")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().split()[2] not in "ZX":
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.05)


def test_all_parts_are_tried_and_reported_as_they_end(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    seen = f"import json; print(len(json.load(open({str(out / 'gpu-check.json')!r}))['parts']))"
    parts = [python("bad", "raise SystemExit(3)"), python("next", seen), python("last", seen)]
    outcomes = run_all(parts, dict(os.environ), out, {"device": "made up"})
    assert [outcome.status for outcome in outcomes] == ["failed", "passed", "passed"]
    assert [outcome.last_lines for outcome in outcomes] == [[], ["1"], ["2"]]
    content = json.loads((out / "gpu-check.json").read_text())
    assert content["machine"] == {"device": "made up"}
    assert [part["name"] for part in content["parts"]] == ["bad", "next", "last"]
    page = (out / "gpu-check.md").read_text()
    assert page.startswith("# GPU check\n\ndevice made up.\n")
    assert page.count("| passed ") == 2


def test_later_parts_get_only_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "TOTAL_S", 0.0)
    (outcome,) = run_all([python("slow", "import time; time.sleep(60)")], {}, tmp_path, {})
    assert outcome.status == "timed out"


def test_all_parts_together_fit_into_nine_minutes(tmp_path: Path) -> None:
    parts = gpu_check.all_parts(tmp_path)
    assert [part.name for part in parts][:2] == ["install", "contracts"]
    assert [part.name for part in parts][-3:] == ["benchmarks", "check", "profile"]
    assert sum(part.limit_s for part in parts[:-2]) <= 9 * 60


def test_parts_are_chosen_by_name_and_none_goes_without_the_installation(tmp_path: Path) -> None:
    parts = gpu_check.all_parts(tmp_path)
    assert gpu_check.chosen_parts(parts, ()) == parts
    chosen = gpu_check.chosen_parts(parts, ["profile", "check"])
    assert [part.name for part in chosen] == ["install", "check", "profile"]
    with pytest.raises(SystemExit, match="no part 'chek'; the parts are 'install', 'contracts'"):
        gpu_check.chosen_parts(parts, ["chek"])


def test_tests_for_a_gpu_are_found_wherever_they_are(tmp_path: Path) -> None:
    for name, text in {
        "contracts/test_a.py": MARK,
        "engine/test_b.py": MARK,
        "engine/test_c.py": "@pytest.mark.slow",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    suites, others = pytest_parts(tmp_path)
    assert suites.command[-2:] == [str(tmp_path / "contracts"), str(tmp_path / "backends")]
    assert others.command[-3:] == ["-m", "gpu", str(tmp_path / "engine" / "test_b.py")]


def test_our_packages_come_before_the_machines_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/old")
    environment = environment_with(tmp_path, tmp_path / "out")
    assert environment["PYTHONPATH"].split(os.pathsep) == [
        str(gpu_check.ROOT),
        str(tmp_path),
        "/old",
    ]
    assert environment["OUT"] == str(tmp_path / "out")
