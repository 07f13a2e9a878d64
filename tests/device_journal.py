"""A line of JSON for each test that starts and ends, written at once: a killed run loses no result.

A pytest plugin that tests/conftest.py loads. It does nothing unless ROLLOUT_TEST_JOURNAL names a
file.
- A line has the run's name (ROLLOUT_TEST_PART), an event ("started", "passed", "failed", "skipped",
  or "finished" for the run) and the test. A failure has its error and the innermost frame of ours.
- A process that meets a CUDA error ends itself once the failure is written: its context is lost, so
  all later tests would fail. xdist replaces a worker; scripts/gpu_check.py starts a run of one
  process again.
- ROLLOUT_TEST_ONLY and ROLLOUT_TEST_EXCEPT name files of node ids: what is run, what is left out.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

JOURNAL, PART = "ROLLOUT_TEST_JOURNAL", "ROLLOUT_TEST_PART"
ONLY, EXCEPT = "ROLLOUT_TEST_ONLY", "ROLLOUT_TEST_EXCEPT"
STACKS = ".stacks-"  # between the journal's name and a process id
ROOT = Path(__file__).resolve().parents[1]
FINISHED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
LOST_DEVICE = 70  # exit status of a process whose CUDA context is gone
ANSWER_S = 10.0  # a device that does not answer in this time is taken for lost
# As torch, Triton, cuBLAS and our own bindings of the runtime and the driver word it. An error in a
# capture leaves the context alive, but torch may abort when it frees the capture's pool.
CUDA_ERRORS = re.compile(
    r"CUDA error: (?!out of memory)|Triton Error \[CUDA\]|CUBLAS_STATUS_(?!ALLOC)|CUDNN_STATUS_"
    r"|\bcu(da)?[A-Z]\w+ failed: "
)


@pytest.hookimpl(trylast=True)  # pytest's own plugin has faulthandler write to stderr before
def pytest_configure(config: pytest.Config) -> None:
    """The journal is written where all reports arrive; a process ends itself where tests run.

    Each process writes its stacks to a file of its own beside the journal: those of processes that
    are aborted together would mix in one log.
    """
    if path := os.environ.get(JOURNAL):
        stacks = open(f"{path}{STACKS}{os.getpid()}", "w", encoding="utf-8")  # noqa: SIM115
        config.add_cleanup(stacks.close)
        faulthandler.enable(stacks)
        is_worker = hasattr(config, "workerinput")
        has_workers = bool(getattr(config.option, "numprocesses", None))
        if not is_worker:
            config.pluginmanager.register(Journal(Path(path), os.environ.get(PART, "")))
        if is_worker or not has_workers:
            config.pluginmanager.register(EndAtCudaError())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for, and what was run before."""
    only, left_out = listed(ONLY), listed(EXCEPT) or set()
    kept = [
        item
        for item in items
        if (only is None or has_test(only, item.nodeid)) and not has_test(left_out, item.nodeid)
    ]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def listed(variable: str) -> set[str] | None:
    """The node ids of the file that the variable names; None without one."""
    path = os.environ.get(variable)
    return None if path is None else set(Path(path).read_text(encoding="utf-8").splitlines())


def has_test(nodeids: set[str], nodeid: str) -> bool:
    """Return whether the node ids name the test or its whole file."""
    return nodeid in nodeids or nodeid.partition("::")[0] in nodeids


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Iterator[pytest.TestReport]:
    """Put the failure on the report, in a form that travels from a worker."""
    report = yield
    if JOURNAL in os.environ and report.failed and call.excinfo is not None:
        report.failure = described(call.excinfo)  # type: ignore[attr-defined]
    return report


def described(excinfo: pytest.ExceptionInfo[BaseException]) -> dict[str, Any]:
    """The error's ends, the innermost frame in this repository, and whether it is CUDA's.

    Its ends: what torch says first of CUDA, and last of tensors that differ, is what matters.
    """
    lines = excinfo.exconly().strip().splitlines() or [excinfo.typename]
    error = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    frames = [entry for entry in excinfo.traceback if is_ours(Path(entry.path))]
    frame = ""
    if frames:
        path = Path(frames[-1].path).resolve().relative_to(ROOT)
        frame = f"{path}:{frames[-1].lineno + 1} {frames[-1].name}"
    return {"error": error, "frame": frame, "is_cuda": is_cuda_error(excinfo.value)}


def is_ours(path: Path) -> bool:
    """Return whether the file belongs to this repository, but not to an environment inside it."""
    resolved = path.resolve()
    return resolved.is_relative_to(ROOT) and "site-packages" not in resolved.parts


def is_cuda_error(error: BaseException | None) -> bool:
    """Return whether the error or a cause of it is CUDA's. Lack of memory does not count."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if CUDA_ERRORS.search(f"{error}") or any(map(is_cuda_error, parts_of(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


def parts_of(error: BaseException) -> Sequence[BaseException]:
    """The errors of a group, as hypothesis raises them."""
    parts: Sequence[BaseException] = getattr(error, "exceptions", ())
    return parts


class Journal:
    """Writes the lines."""

    def __init__(self, path: Path, part: str) -> None:
        self._path, self._part = path, part
        self._running: dict[str, tuple[str, float]] = {}  # test -> outcome and seconds so far
        self._failed: set[str] = set()
        self._is_counted = False

    def write(self, event: str, **fields: Any) -> None:
        """Append a line that is on its way to the disk when this returns."""
        line = json.dumps({"part": self._part, "event": event, **fields})
        with self._path.open("a", encoding="utf-8") as journal:
            journal.write(line + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write_count(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._write_count(len(ids))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = "passed", 0.0
        self.write("started", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a failure at once, and a pass or a skip when the test has ended."""
        test = report.nodeid
        outcome, seconds = self._running.get(test, ("passed", 0.0))
        outcome = "skipped" if report.skipped else outcome
        self._running[test] = outcome, seconds + report.duration
        if report.failed:
            self._write_failure(report)
        elif report.when == "teardown" and test not in self._failed:
            self.write(outcome, test=test, seconds=round(self._running.pop(test)[1], 2))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write_failure(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in FINISHED:
            self.write("finished")

    def _write_count(self, count: int) -> None:
        """How many tests there are; all workers collect the same."""
        if not self._is_counted:
            self._is_counted = True
            self.write("collected", count=count)

    def _write_failure(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Once for each test: a worker that ends itself is reported again, as crashed."""
        if report.nodeid not in self._failed:
            self._failed.add(report.nodeid)
            failure = getattr(report, "failure", None) or failure_of(report)
            self.write("failed", test=report.nodeid, **failure)


def failure_of(report: pytest.CollectReport | pytest.TestReport) -> dict[str, Any]:
    """Describe a report without an exception: a file that failed to import, or a dead worker."""
    lines = [line for line in str(report.longrepr).strip().splitlines() if line.strip()]
    return {"error": lines[-1].removeprefix("E  ").strip() if lines else "", "frame": ""}


class EndAtCudaError:
    """Ends the process that has lost its device, after all others have got the report."""

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        failure = getattr(report, "failure", None)
        if failure is not None and (failure["is_cuda"] or not device_answers()):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(LOST_DEVICE)


def device_answers() -> bool:
    """Return whether this process can still use its device; True if it has used none.

    Ends the process if the device says nothing.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    faulthandler.dump_traceback_later(ANSWER_S, exit=True)
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    finally:
        faulthandler.cancel_dump_traceback_later()
    return True
