"""The peers' suites: where their tests come from, what runs them, and which of their files run."""

from __future__ import annotations

from dataclasses import dataclass

from tests.doors.clients import Client
from tests.peers.openai_table import OPENAI_CASES, OPENAI_RUNS, OPENAI_UNRUN_FILES
from tests.peers.runs import Run
from tests.peers.sglang_table import SGLANG_CASES, SGLANG_KITS, SGLANG_UNRUN_KITS
from tests.peers.verdicts import Rule, Verdict, expression_of
from tests.peers.vllm_table import VLLM_CASES, VLLM_FILES, VLLM_UNRUN_FILES


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The test suite of one distribution.

    version, kind: as for `find_source`. tests: the folder of tests in the distribution.
    test_files: how their files are called.
    requirements: what pip installs for them; "{version}" is that of the distribution.
    shims: a folder of ours that is laid over the tests. pytest_options: for their pytest.
    runs: the files that run. adapted: files whose tests a file of `shims` runs.
    unrun_files: rules of the other files; one without a rule is a fault.
    cases: rules of cases in files that run.
    """

    project: str
    version: str
    kind: str = "sdist"
    tests: str = "tests"
    test_files: str = "test_*.py"
    adapted: tuple[str, ...] = ()
    requirements: tuple[str, ...]
    is_layered: bool
    runs: tuple[Run, ...]
    unrun_files: tuple[Rule, ...]
    cases: tuple[Rule, ...]
    shims: str | None = None
    pytest_options: tuple[str, ...] = ()

    @property
    def run_files(self) -> tuple[str, ...]:
        return tuple(file for run in self.runs for file in run.files)

    @property
    def unrun_cases(self) -> str:
        """The regular expression of the ids of cases, in files that run, that do not run."""
        unrun = [rule for rule in self.cases if rule.verdict is Verdict.NOT_APPLICABLE]
        return "|".join(expression_of(rule.pattern) for rule in unrun)

    def client(self, version: str) -> Client:
        """The environment in which the tests run."""
        requirements = tuple(each.format(version=version) for each in self.requirements)
        return Client(requirements=requirements, is_layered=self.is_layered)


_PYTEST = ("pytest", "pytest-asyncio", "pytest-timeout")
SUITES = {
    "vllm": Suite(
        project="vllm",
        version="0.33.0",
        requirements=(
            *("openai>=2.25", *_PYTEST, "fastapi", "jsonschema", "pybase64", "rapidfuzz"),
        ),
        is_layered=True,
        runs=(Run(files=VLLM_FILES),),
        unrun_files=VLLM_UNRUN_FILES,
        cases=VLLM_CASES,
        shims="vllm_tests",
    ),
    "openai": Suite(
        project="openai",
        version="3.*",
        requirements=("openai[aiohttp]=={version}", *_PYTEST, "inline-snapshot", "rich"),
        is_layered=False,
        runs=OPENAI_RUNS,
        unrun_files=OPENAI_UNRUN_FILES,
        cases=OPENAI_CASES,
        pytest_options=(
            *("-o", "asyncio_mode=auto"),
            *("-o", "asyncio_default_fixture_loop_scope=session"),
        ),
    ),
    "sglang": Suite(
        project="sglang",
        version="0.5.23",
        kind="wheel",
        tests="sglang/test",
        test_files="*_kit.py",
        adapted=SGLANG_KITS,
        requirements=(*_PYTEST, "requests"),
        is_layered=False,
        runs=(Run(files=("kits_over_http.py",), model_name="default"),),
        unrun_files=SGLANG_UNRUN_KITS,
        cases=SGLANG_CASES,
        shims="sglang_tests",
    ),
}
