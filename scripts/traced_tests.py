"""Which test executes which line of the code, and the CPU seconds that each test takes."""

from __future__ import annotations

import resource
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from coverage import Coverage

from scripts.mutation import Mutant

_AT_IMPORT = ""  # coverage.py's name of the context before the first test


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTests:
    """What one run of the tests has executed: for each file and line the ids of tests.

    What a test's child processes execute is not traced.
    """

    cpu_s: dict[str, float] = field(default_factory=dict)
    with_processes: set[str] = field(default_factory=set)
    tests_by_line: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    def tests_of(self, mutant: Mutant) -> dict[str, float]:
        """Return the tests that execute the mutant's statement, with their CPU seconds.

        What a file executes when it is imported serves all tests that execute anything of the file,
        or all tests if none does. Tests that start processes may execute whatever others do.
        """
        lines = self.tests_by_line.get(mutant.path, {})
        tests: set[str] = set()
        for line in range(mutant.start, mutant.end + 1):
            tests |= lines.get(line, set())
        if _AT_IMPORT in tests:
            tests = set().union(*lines.values()) - {_AT_IMPORT} or set(self.cpu_s)
        if tests:
            tests |= self.with_processes
        return {test: self.cpu_s[test] for test in sorted(tests)}


def cpu_seconds() -> tuple[float, float]:
    """The CPU seconds of this process, and of its child processes that have ended.

    To the microsecond, which `os.times` is not: a short child may take none of its ticks.
    """
    users = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    own_s, children_s = (
        usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, users)
    )
    return own_s, children_s


class Tracer:
    """A pytest plugin that records a TracedTests of the packages."""

    def __init__(self, tree: Path, packages: Sequence[str]) -> None:
        self.traced = TracedTests()
        self._tree = tree
        include = [str(tree / package / "*") for package in packages]
        self._coverage = Coverage(data_file=None, config_file=False, include=include)
        self._coverage.start()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:  # traced tests are slower
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "timeout"]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._coverage.switch_context(item.nodeid)
        own_before_s, children_before_s = cpu_seconds()
        try:
            return (yield)
        finally:
            own_s, children_s = cpu_seconds()
            if children_s > children_before_s:
                self.traced.with_processes.add(item.nodeid)
            used_s = own_s - own_before_s + children_s - children_before_s
            self.traced.cpu_s[item.nodeid] = used_s

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        found = self._coverage.get_data()
        for path in found.measured_files():
            by_line = found.contexts_by_lineno(path)
            name = str(Path(path).relative_to(self._tree))
            self.traced.tests_by_line[name] = {line: set(tests) for line, tests in by_line.items()}
