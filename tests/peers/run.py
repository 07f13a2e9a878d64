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
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.doors.environments import ROOT, python_of
from tests.peers.model import write_model
from tests.peers.report import case_lines, summary_lines
from tests.peers.runs import Run
from tests.peers.sources import find_source, unpack_tests
from tests.peers.suites import SUITES, Suite
from tests.peers.verdicts import Judged, Outcome, judge, judge_unrun_files

HOME = ROOT / ".peers"
HERE = Path(__file__).parent
RUN_S, CASE_S, EXIT_S = 3600, 300, 60


def main(names: list[str]) -> int:
    HOME.mkdir(exist_ok=True)
    judged = {name: judged_suite(name, SUITES[name]) for name in names or SUITES}
    whole = [line for name, cases in judged.items() for line in case_lines(name, cases)]
    summary = [line for name, cases in judged.items() for line in summary_lines(name, cases)]
    (HOME / "table.txt").write_text("\n".join([*whole, *summary, ""]), encoding="utf-8")
    print(*summary, f"every case: {HOME / 'table.txt'}", sep="\n")
    return int(not all(cases.is_as_listed for cases in judged.values()))


def judged_suite(name: str, suite: Suite) -> Judged:
    """Run the files of a suite that run, and judge all its cases."""
    source = find_source(suite.project, suite.version)
    folder = unpack_tests(source, HOME)
    tests = folder / "tests"
    if suite.shims is not None:
        shutil.copytree(HERE / "shims" / suite.shims, tests, dirs_exist_ok=True)
    model = HOME / f"{name}-model"
    if not model.exists():
        model.mkdir()
        write_model(model, texts_of(tests))
    python = python_of(name, suite.client(source.version), HOME.name)
    outcomes = [
        outcome
        for run in suite.runs
        for outcome in outcomes_of(run, suite, python, folder, model, source.version)
    ]
    judged = judge(outcomes, suite.cases)
    judge_unrun_files(tests, suite.run_files, suite.unrun_files, judged)
    return judged


def texts_of(tests: Path) -> Iterator[str]:
    for path in sorted(tests.rglob("test_*.py")):
        yield path.read_text(encoding="utf-8")


def outcomes_of(
    run: Run, suite: Suite, python: str, folder: Path, model: Path, version: str
) -> list[Outcome]:
    """Run the files of `run` by pytest in the suite's environment."""
    path = HOME / "outcomes.jsonl"
    path.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PEER_MODEL": str(model),
        "PEER_OUTCOMES": str(path),
        "PEER_PYTHON": sys.executable,
        "PEER_ROOT": str(ROOT),
        "PEER_UNRUN": suite.unrun_cases,
        "PEER_VERSION": version,
        "PYTHONPATH": os.pathsep.join(map(str, [HERE / "plugin", HERE / "shims", folder])),
    }
    command = [python, "-m", "pytest", "-p", "peer_outcomes", "-p", "no:cacheprovider"]
    command += ["-q", "-p", "no:warnings", "--tb=short", f"--timeout={CASE_S}"]
    command += ["-c", os.devnull, "--continue-on-collection-errors"]
    command += [f"--rootdir={folder / 'tests'}", *suite.pytest_options, *run.files]
    with (
        open(HOME / f"{folder.name}.log", "a", encoding="utf-8") as log,
        serving(run, model) as url,
    ):
        if url is not None:
            environment["TEST_API_BASE_URL"] = f"{url}/v1"
        subprocess.run(
            command, cwd=folder / "tests", env=environment, timeout=RUN_S, stdout=log, stderr=log
        )
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Outcome(**json.loads(line)) for line in lines]


@contextmanager
def serving(run: Run, model: Path) -> Iterator[str | None]:
    """The server of a run whose tests start none; yields its URL."""
    if run.model_name is None:
        yield None
        return
    command = [sys.executable, "-m", "rollout", "serve", "--json", f"model={model}", "port=0"]
    command += [f"served_model_name={run.model_name}", "num_threads=1", "max_sequence_length=512"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert line, "the server did not start"
        yield json.loads(line)["url"]
    finally:
        server.terminate()
        server.wait(EXIT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
