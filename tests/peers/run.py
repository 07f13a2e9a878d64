"""Run the test suites of peers over `rollout serve` on a tiny random model: `make test-peers`.

    python tests/peers/run.py [SUITE ...]

SUITE: of those in suites.py, all without any. Each suite's source distribution comes from PyPI to
.peers, and runs there in an environment of its own. The table is printed by file, and written with
every case to .peers/table.txt. Exit status 1: a case fails that the tables do not list, or one
passes that they list as failing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.doors.environments import ROOT, python_of
from tests.doors.server import serving
from tests.peers.model import write_model
from tests.peers.report import case_lines, summary_lines
from tests.peers.sources import find_source, unpack_tests
from tests.peers.suites import SUITES, Suite
from tests.peers.verdicts import Judged, Outcome, judge, judge_unrun_files

HOME = ROOT / ".peers"
HERE = Path(__file__).parent
RUN_S, CASE_S = 3600, 300


def main(names: list[str]) -> int:
    HOME.mkdir(exist_ok=True)
    judged = {name: judged_suite(SUITES[name]) for name in names or SUITES}
    whole = [line for name, cases in judged.items() for line in case_lines(name, cases)]
    summary = [line for name, cases in judged.items() for line in summary_lines(name, cases)]
    (HOME / "table.txt").write_text("\n".join([*whole, *summary, ""]), encoding="utf-8")
    print(*summary, f"every case: {HOME / 'table.txt'}", sep="\n")
    return int(not all(cases.is_as_listed for cases in judged.values()))


def judged_suite(suite: Suite) -> Judged:
    """Run the files of a suite that run, and judge all its cases."""
    source = find_source(suite.project, suite.version, suite.kind)
    folder = unpack_tests(source, suite.tests, HOME)
    tests, model = folder / "tests", folder / "model"
    if suite.shims is not None:
        shutil.copytree(HERE / "shims" / suite.shims, tests, dirs_exist_ok=True)
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir()
    write_model(model, texts_of(tests))
    python = python_of(suite.project, suite.client(source.version), HOME.name)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PEER_MODEL": str(model),
        "PEER_OUTCOMES": str(folder / "outcomes.jsonl"),
        "PEER_PYTHON": sys.executable,
        "PEER_ROOT": str(ROOT),
        "PEER_UNRUN": suite.unrun_cases,
        "PEER_VERSION": source.version,
        "PYTHONPATH": os.pathsep.join(map(str, [HERE / "plugin", HERE / "shims", folder])),
    }
    outcomes: list[Outcome] = []
    for run in suite.runs:
        with ExitStack() as stack:
            if run.model_name is not None:
                settings = [f"model={model}", f"served_model_name={run.model_name}"]
                url = stack.enter_context(serving(*settings, "enable_prefix_caching=true"))
                environment["TEST_API_BASE_URL"] = f"{url}/v1"
            outcomes += run_tests(python, (*suite.pytest_options, *run.files), tests, environment)
    judged = judge(outcomes, suite.cases)
    files = (*suite.run_files, *suite.adapted)
    judge_unrun_files(tests, suite.test_files, files, suite.unrun_files, judged)
    return judged


def texts_of(tests: Path) -> Iterator[str]:
    for path in sorted(tests.rglob("*.py")):
        yield path.read_text(encoding="utf-8")


def run_tests(
    python: str, arguments: Sequence[str], tests: Path, environment: Mapping[str, str]
) -> list[Outcome]:
    """Run pytest in a suite's environment. What it prints goes to a log beside `tests`."""
    path = Path(environment["PEER_OUTCOMES"])
    path.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-p", "peer_outcomes", "-p", "no:cacheprovider"]
    command += ["-q", "-p", "no:warnings", "--tb=short", f"--timeout={CASE_S}"]
    command += ["-c", os.devnull, f"--rootdir={tests}", "--continue-on-collection-errors"]
    with open(tests.parent / "pytest.log", "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=tests,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait(RUN_S)
        finally:
            # The servers of tests that were cut short are of the same group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(
            f"pytest exited with {process.returncode}; see {tests.parent}/pytest.log"
        )
    return [Outcome(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
