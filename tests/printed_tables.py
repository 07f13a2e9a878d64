"""Tables that a run prints at its end: a test adds a row with `record_property("table", ...)`.

A pytest plugin that tests/conftest.py loads; rows come from the workers of a parallel run, too.
"""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the rows under their heads, in the order in which tests have ended."""
    tables: dict[str, list[str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in report.user_properties:
                if name == "table":
                    head, row = value
                    tables.setdefault(head, []).append(row)
    for head, rows in tables.items():
        terminalreporter.write_line("")
        for line in (head, *sorted(rows)):
            terminalreporter.write_line(line)
