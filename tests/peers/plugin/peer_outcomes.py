"""A pytest plugin for the process in which a peer's tests run: writes the outcome of each case.

PEER_OUTCOMES is the file: one JSON object a line, written as the cases end. PEER_UNRUN is a
regular expression of the ids of cases that are not run.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

_OUTCOMES = Path(os.environ["PEER_OUTCOMES"])
_UNRUN = re.compile(os.environ["PEER_UNRUN"])


def _write(case: str, outcome: str, reason: str = "") -> None:
    line = json.dumps({"case": case, "outcome": outcome, "reason": reason})
    with _OUTCOMES.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unrun = [item for item in items if _UNRUN.fullmatch(item.nodeid)]
    for item in unrun:
        _write(item.nodeid, "unrun")
    config.hook.pytest_deselected(items=unrun)
    items[:] = [item for item in items if not _UNRUN.fullmatch(item.nodeid)]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if not report.passed:
        _write(report.nodeid, report.outcome, _reason(report))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A case has one outcome: of its call, or of the phase that did not pass before or after it."""
    if report.when == "call" or not report.passed:
        _write(report.nodeid, report.outcome, _reason(report))


def _reason(report: Any) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):  # a skipped test's file, line and reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr if crash is None else crash.message)[:2000]
