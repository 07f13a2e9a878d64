"""The journal of a test run: each result at once, and an end to a process that lost its device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device_journal import LOST_DEVICE, is_cuda_error
from tests.scripts.device_tree import MACHINE, make_tree

PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
HEAD = "import os, pytest, torch\n"
EVERY_OUTCOME = """
@pytest.fixture
def broken(): raise ValueError("no fixture")
@pytest.fixture
def left_open():
    yield
    raise ValueError("not closed")
def test_passes(): pass
def test_fails(): assert 1 == 2
def test_is_skipped(): pytest.skip("not here")
@pytest.mark.xfail(strict=True)
def test_is_expected_to_fail(): assert False
def test_has_no_fixture(broken): pass
def test_is_not_closed(left_open): pass
"""
# The second one swallows the error: what it shows is its own assertion.
LOST = """
def test_before(): torch.cuda.launch()
def test_loses(): torch.cuda.launch_out_of_bounds()
def test_between(): torch.cuda.launch()
def test_loses_and_says_nothing():
    try: torch.cuda.launch_out_of_bounds()
    except RuntimeError: pass
    raise AssertionError("nothing came back")
def test_after(): torch.cuda.launch()
"""
NESTED = """
from tests.deeper import fall
def test_it(): fall(3)
"""
DEEPER = """
import json
def fall(depth):
    if depth: fall(depth - 1)
    else: json.loads("{")
"""
HANGS = """
@pytest.mark.timeout(1)
def test_hangs():
    import signal, time
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True: time.sleep(60)
def test_after(): pass
"""


def run(
    folder: Path, tests: str, *options: str, files: dict[str, str] | None = None, **lists: list[str]
) -> tuple[list[dict[str, object]], int]:
    """The journal's lines, and pytest's exit status."""
    tree = make_tree(folder / "tree", {"tests/contracts/test_a.py": HEAD + tests, **(files or {})})
    journal = folder / "tests.jsonl"
    environment = {name: value for name, value in os.environ.items() if name[:7] != "PYTEST_"}
    environment |= {"ROLLOUT_TEST_JOURNAL": str(journal), "ROLLOUT_TEST_PART": "part"}
    environment |= {"PYTEST_PLUGINS": "xdist.plugin,pytest_timeout"}
    for variable, nodeids in lists.items():
        (folder / variable).write_text("\n".join(nodeids))
        environment[variable] = str(folder / variable)
    done = subprocess.run(
        [*PYTEST, *options, "tests/contracts/test_a.py"],
        cwd=tree,
        env={
            **environment,
            "PYTHONPATH": f"{tree}{os.pathsep}{MACHINE}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
    )
    assert journal.exists(), done.stdout + done.stderr
    return [json.loads(line) for line in journal.read_text().splitlines()], done.returncode


def outcomes(lines: list[dict[str, object]]) -> dict[str, object]:
    """Short name of each test that started -> the last that is known of it."""
    tests = [(str(line["test"]), line["event"]) for line in lines if "test" in line]
    return {test.removeprefix("tests/contracts/test_a.py::"): event for test, event in tests}


IN_WORKERS = ("-n", "2", "--max-worker-restart=9")


@pytest.mark.parametrize("options", [(), IN_WORKERS], ids=["one process", "workers"])
def test_every_outcome_is_written_once(tmp_path: Path, options: tuple[str, ...]) -> None:
    lines, status = run(tmp_path, EVERY_OUTCOME, *options)
    assert status == 1
    assert outcomes(lines) == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_is_skipped": "skipped",
        "test_is_expected_to_fail": "skipped",
        "test_has_no_fixture": "failed",
        "test_is_not_closed": "failed",
    }
    ended = [line["test"] for line in lines if line["event"] in ("passed", "failed", "skipped")]
    assert len(ended) == len(set(ended)) == 6
    assert {line["part"] for line in lines} == {"part"}
    assert [line["count"] for line in lines if line["event"] == "collected"] == [6]
    assert lines[-1]["event"] == "finished"
    errors = {line["error"] for line in lines if line["event"] == "failed"}
    assert errors == {
        "AssertionError: assert 1 == 2",
        "ValueError: no fixture",
        "ValueError: not closed",
    }


def test_workers_that_lose_the_device_are_replaced_and_no_other_test_is_lost(
    tmp_path: Path,
) -> None:
    lines, _ = run(tmp_path, LOST, *IN_WORKERS)
    assert outcomes(lines) == {
        "test_before": "passed",
        "test_loses": "failed",
        "test_between": "passed",
        "test_loses_and_says_nothing": "failed",
        "test_after": "passed",
    }
    assert lines[-1]["event"] == "finished"


def test_one_process_that_loses_the_device_ends_with_the_failure_written(tmp_path: Path) -> None:
    lines, status = run(tmp_path, LOST)
    assert status == LOST_DEVICE
    assert outcomes(lines) == {"test_before": "passed", "test_loses": "failed"}
    assert lines[-1]["is_cuda"] is True


def test_one_process_ends_also_where_the_test_swallowed_the_error(tmp_path: Path) -> None:
    left_out = ["tests/contracts/test_a.py::test_loses"]
    lines, status = run(tmp_path, LOST, ROLLOUT_TEST_EXCEPT=left_out)
    assert status == LOST_DEVICE
    assert list(outcomes(lines))[-1] == "test_loses_and_says_nothing"
    assert lines[-1]["error"] == "AssertionError: nothing came back"


def test_a_failure_has_the_innermost_frame_of_our_own_code(tmp_path: Path) -> None:
    lines, _ = run(tmp_path, NESTED, files={"tests/deeper.py": DEEPER})
    (failure,) = [line for line in lines if line["event"] == "failed"]
    assert failure["frame"] == "tests/deeper.py:5 fall"
    assert str(failure["error"]).startswith("json.decoder.JSONDecodeError: Expecting property")


def test_a_worker_whose_test_does_not_end_is_replaced(tmp_path: Path) -> None:
    lines, _ = run(tmp_path, HANGS, *IN_WORKERS, "--timeout-method=thread")
    assert outcomes(lines) == {"test_hangs": "failed", "test_after": "passed"}


def test_only_what_is_listed_runs_and_nothing_that_ran_before(tmp_path: Path) -> None:
    names = [f"tests/contracts/test_a.py::test_{name}" for name in ("passes", "fails", "gone")]
    lines, _ = run(tmp_path, EVERY_OUTCOME, ROLLOUT_TEST_ONLY=names, ROLLOUT_TEST_EXCEPT=names[1:2])
    assert outcomes(lines) == {"test_passes": "passed"}


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class Group(Exception):
    def __init__(self, *exceptions: Exception) -> None:
        super().__init__("2 distinct failures")
        self.exceptions = exceptions


LOST_CONTEXT = RuntimeError("CUDA error: device-side assert triggered\nand more")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LOST_CONTEXT, True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublas`"), True),
        (RuntimeError("cudaMemPrefetchAsync failed: unspecified launch failure (error 719)"), True),
        (RuntimeError("cuMemMap failed: invalid device context (error 201)"), True),
        (caused(ValueError("a step failed"), LOST_CONTEXT), True),
        (Group(ValueError("one"), LOST_CONTEXT), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (AssertionError("Tensor-likes are not close!"), False),
        (ValueError("custom failed: no"), False),
        (Group(ValueError("one"), ValueError("two")), False),
    ],
)
def test_what_loses_the_context_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_cuda_error(error) == expected
