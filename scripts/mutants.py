"""How much the tests catch: change the code in one place at a time, and see whether a test fails.

    python scripts/mutants.py --count 300 --jobs 2 --budget-s 60
    python scripts/mutants.py --count 20 --seed 7 rollout/blocks

A mutant is one changed comparison, operator, condition, number or flag, or one call left out, drawn
at random from the packages named. First the tests of these packages, of the engine and the walks
run once on the unchanged code, which records the lines that each test executes; a failure ends the
script. Each mutant is then tested in a copy of the tree by the tests that execute its statement,
the cheapest first, until these have taken `--budget-s` seconds of CPU time: what is found does not
depend on what else the machine does. The first failure kills a mutant, and so does a test that
hangs. A test that alone takes more than the budget is left out.

Mutants that survive are listed with their line: each is a fault that these tests do not notice
within the budget, or a change that means nothing. `--out` names a JSON file, which is written anew
after each mutant.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue

import pytest
from hypothesis import Phase, settings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from scripts.mutation import Mutant, mutants_of, mutated
from scripts.traced_tests import TracedTests, Tracer, cpu_seconds

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "rollout/scheduling",
    "rollout/blocks",
    "rollout/engine",
    "rollout/requests",
)
LAST_TESTS = ("tests/engine", "tests/walks")
LEFT_OUT = ("tests/engine/test_state_space.py",)  # minutes, more than any budget
KILLED, TIMED_OUT = "killed", "killed by time"
SURVIVED, OUT_OF_BUDGET, NOT_COVERED = "survived", "survived the budget", "not covered"
_OPTIONS = ("-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider")
# A test hangs if it takes this long by the clock, and this long for each of its CPU seconds.
_TEST_LIMIT_S, _LIMIT_PER_CPU_S = 120.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Whether a test noticed: KILLED, TIMED_OUT, SURVIVED all tests, OUT_OF_BUDGET, NOT_COVERED."""

    mutant: Mutant
    fate: str
    cpu_s: float


class CpuBudget:
    """A pytest plugin that runs some of the tests, the cheapest first, until the budget is used.

    CPU seconds of this process from the first test on, and of child processes that have ended.
    """

    def __init__(self, cpu_s: Mapping[str, float], budget_s: float) -> None:
        self._cpu_s = cpu_s
        self._budget_s = budget_s
        self._start_s = sum(cpu_seconds())
        self._has_timed_out = False
        self._is_spent = False

    def pytest_collection(self) -> None:
        """Before tests are imported: a failing example need not be made small."""
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings.default, phases=phases)
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._cpu_s]
        items.sort(key=lambda item: self._cpu_s[item.nodeid])
        for item in items:
            if item.get_closest_marker("timeout") is None:
                limit_s = _TEST_LIMIT_S + _LIMIT_PER_CPU_S * self._cpu_s[item.nodeid]
                item.add_marker(pytest.mark.timeout(limit_s))
        self._start_s = sum(cpu_seconds())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_timeout = report.failed and "from pytest-timeout" in str(report.longrepr)
        self._has_timed_out = self._has_timed_out or is_timeout

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if self.used_s >= self._budget_s:
            self._is_spent = True
            item.session.shouldstop = "the CPU budget is spent"

    @property
    def used_s(self) -> float:
        return sum(cpu_seconds()) - self._start_s

    def fate(self, status: int) -> str:
        """Return what the exit status of pytest means. A failing last test outweighs the budget."""
        if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return SURVIVED
        if self._is_spent and status == pytest.ExitCode.INTERRUPTED:
            return OUT_OF_BUDGET
        return TIMED_OUT if self._has_timed_out else KILLED


def drawn(packages: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return up to `count` mutants of the packages, each as likely as any other."""
    paths = sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))
    everyone = [
        mutant
        for path in paths
        for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text())
    ]
    return random.Random(seed).sample(everyone, min(count, len(everyone)))


def folders_of_tests(packages: Sequence[str]) -> list[str]:
    """The tests that are used: those of the packages, and LAST_TESTS."""
    own = [f"tests/{Path(package).parts[1]}" for package in packages]
    return [name for name in dict.fromkeys([*own, *LAST_TESTS]) if (ROOT / name).is_dir()]


def _enter(tree: Path) -> None:
    """In a process of its own: import from the tree, and say nothing."""
    os.setsid()  # what the tests start is killed with them
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)


def _trace(tree: Path, packages: Sequence[str], folders: Sequence[str], result: Connection) -> None:
    """In a new process: send pytest's exit status, the TracedTests, environment and modules."""
    _enter(tree)
    sys.dont_write_bytecode = False  # every run of a mutant reads it
    tracer = Tracer(tree, packages)
    status = pytest.main(
        [*_OPTIONS, *(f"--ignore={name}" for name in LEFT_OUT), *folders], plugins=[tracer]
    )
    modules = [
        name
        for name, module in list(sys.modules.items())
        if (path := getattr(module, "__file__", None)) and not Path(path).is_relative_to(tree)
    ]
    result.send((status, tracer.traced, dict(os.environ), modules))


def trace(
    tree: Path, packages: Sequence[str], folders: Sequence[str]
) -> tuple[TracedTests, dict[str, str], list[str]]:
    """Run the tests of the unchanged tree. Returns (tests, their environment, others' modules).

    Raises SystemExit if one fails.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=_trace, args=(tree, packages, folders, sender))
    process.start()
    sender.close()
    try:
        status, traced, environment, modules = receiver.recv()
    except EOFError:
        raise SystemExit("without a mutant, the tests crashed") from None
    finally:
        process.join()
    if status != pytest.ExitCode.OK:
        raise SystemExit(f"without a mutant, {' '.join(folders)} ended with status {status}")
    return traced, environment, modules


def _run_tests(tree: Path, tests: Mapping[str, float], budget_s: float, result: Connection) -> None:
    """In a forked process: send (fate, CPU seconds)."""
    _enter(tree)
    # Bytecode tells sources apart by second and size, which two mutants may have in common.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    budget = CpuBudget(tests, budget_s)
    status = pytest.main([*_OPTIONS, *files], plugins=[budget])
    result.send((budget.fate(status), budget.used_s))


def run(
    tree: Path,
    mutant: Mutant | None,
    tests: Mapping[str, float],
    *,
    budget_s: float,
    limit_s: float,
) -> tuple[str, float]:
    """Test one mutant in a copy of the tree, or the copy as it is. Returns (fate, CPU seconds)."""
    path = tree / (mutant.path if mutant is not None else "pyproject.toml")
    source, status = path.read_text(), path.stat()
    if mutant is not None:
        path.write_text(mutated(source, mutant))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("forkserver").Process(
        target=_run_tests, args=(tree, tests, budget_s, sender)
    )
    try:
        process.start()
        ready = wait([receiver, process.sentinel], limit_s)
        if receiver in ready:
            fate, cpu_s = receiver.recv()
            return fate, cpu_s
        return (KILLED, 0.0) if ready else (TIMED_OUT, budget_s)  # it has crashed, or it hangs
    finally:
        sender.close()
        receiver.close()
        if process.pid is not None:
            process.kill()  # it may not have its group yet
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.join()
        path.write_text(source)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # its bytecode stays valid


def fate_of(
    mutant: Mutant, traced: TracedTests, tree: Path, budget_s: float, limit_s: float
) -> Outcome:
    """Test one mutant by the tests that execute its statement."""
    executing = traced.tests_of(mutant)
    tests = {test: test_s for test, test_s in executing.items() if test_s <= budget_s}
    fate, cpu_s = NOT_COVERED, 0.0
    if tests:
        fate, cpu_s = run(tree, mutant, tests, budget_s=budget_s, limit_s=limit_s)
    if fate in (SURVIVED, NOT_COVERED) and len(tests) < len(executing):
        fate = OUT_OF_BUDGET
    return Outcome(mutant=mutant, fate=fate, cpu_s=cpu_s)


def copies(folder: str, count: int) -> list[Path]:
    """Copy the tracked files `count` times, so that mutants can be tested side by side."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    trees = [Path(folder, str(number)) for number in range(count)]
    for tree in trees:
        for name in listed:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    return trees


def run_all(
    mutants: Sequence[Mutant],
    traced: TracedTests,
    trees: Sequence[Path],
    budget_s: float,
    limit_s: float,
) -> Iterator[Outcome]:
    """Test the mutants, as many at a time as there are trees, beside a progress bar."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(mutant: Mutant) -> Outcome:
        tree = free.get()
        try:
            return fate_of(mutant, traced, tree, budget_s, limit_s)
        finally:
            free.put(tree)

    columns = (TextColumn("mutants"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar, ThreadPoolExecutor(len(trees)) as pool:
        task = bar.add_task("", total=len(mutants))
        for future in as_completed([pool.submit(one, mutant) for mutant in mutants]):
            bar.advance(task)
            yield future.result()


def summary(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the number of mutants of each fate, and the share killed."""
    fates = Counter(outcome.fate for outcome in outcomes)
    num_killed = fates[KILLED] + fates[TIMED_OUT]
    return {
        "mutants": len(outcomes),
        KILLED: fates[KILLED],
        TIMED_OUT: fates[TIMED_OUT],
        SURVIVED: len(outcomes) - num_killed,
        OUT_OF_BUDGET: fates[OUT_OF_BUDGET],
        NOT_COVERED: fates[NOT_COVERED],
        "share killed": num_killed / len(outcomes) if outcomes else 0.0,
        "mean CPU s": sum(outcome.cpu_s for outcome in outcomes) / max(1, len(outcomes)),
    }


def write(path: Path, seed: int, outcomes: Sequence[Outcome]) -> None:
    """Write all outcomes so far as JSON."""
    listed = [asdict(outcome) for outcome in outcomes]
    path.write_text(json.dumps({"seed": seed, **summary(outcomes), "outcomes": listed}))


def report(console: Console, seed: int, outcomes: Sequence[Outcome]) -> None:
    """Print the mutants that survived, by line, and the number of each fate."""
    for outcome in sorted(outcomes, key=lambda o: (o.mutant.path, o.mutant.line)):
        if outcome.fate not in (KILLED, TIMED_OUT):
            mutant = outcome.mutant
            change = f"{mutant.before} -> {mutant.after}"
            line = f"{mutant.path}:{mutant.line}: {change} ({outcome.fate})"
            console.print(line, markup=False, highlight=False)
    console.print(f"seed {seed}: {summary(outcomes)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="folders of the code")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None, help="draws the same mutants again")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--budget-s", type=float, default=60.0, help="CPU seconds of tests for each mutant"
    )
    parser.add_argument(
        "--limit-s", type=float, default=900.0, help="seconds by the clock for each mutant"
    )
    parser.add_argument("--out", type=Path, help="JSON file of all outcomes")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().getrandbits(31) if given.seed is None else given.seed
    console = Console()
    mutants = drawn(given.packages, given.count, seed)
    folders = folders_of_tests(given.packages)
    os.environ["ROLLOUT_TEST_SEED"] = str(seed)
    # Fewer random lives than usual: they are lived for each mutant.
    os.environ.setdefault("ROLLOUT_TEST_LIVES", "5")
    with tempfile.TemporaryDirectory(prefix="rollout-mutants-") as folder:
        trees = copies(folder, given.jobs)
        traced, environment, modules = trace(trees[0], given.packages, folders)
        os.environ.update(environment)
        # Imported once: every run forks from a process that has them.
        multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
        cheap = {test: cpu_s for test, cpu_s in traced.cpu_s.items() if cpu_s <= given.budget_s}
        console.print(f"without a mutant: {sum(traced.cpu_s.values()):.0f} CPU seconds, traced")
        console.print(f"{len(cheap)} of {len(traced.cpu_s)} tests take less than the budget")
        limit_s = given.limit_s
        fate, cpu_s = run(trees[0], None, cheap, budget_s=given.budget_s, limit_s=limit_s)
        if fate not in (SURVIVED, OUT_OF_BUDGET):
            raise SystemExit(f"without a mutant, the tests were {fate}")
        console.print(f"without a mutant: {cpu_s:.0f} CPU seconds")
        outcomes: list[Outcome] = []
        for outcome in run_all(mutants, traced, trees, given.budget_s, limit_s):
            outcomes.append(outcome)
            if given.out is not None:
                write(given.out, seed, outcomes)
    report(console, seed, outcomes)


if __name__ == "__main__":
    main()
