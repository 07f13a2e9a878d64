"""How much the tests catch: change the code in one place at a time, and see whether a test fails.

    python scripts/mutants.py --count 300 --jobs 2 --budget-s 60
    python scripts/mutants.py --count 20 --seed 7 rollout/blocks

A mutant is one changed comparison, operator, condition, number or flag, or one call left out, drawn
at random from the packages named. Each is tested in a copy of the tree, by the tests of its package
first and then by those of the engine and the walks, until these have taken `--budget-s` seconds of
CPU time: what is found does not depend on what else the machine does. The first failure kills a
mutant, and so does a test that hangs. First the copy is tested as it is; a failure ends the script.

Mutants that survive are listed with their line: each is a fault that these tests do not notice
within the budget, or a change that means nothing. `--out` names a JSON file, which is written anew
after each mutant.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "rollout/scheduling",
    "rollout/blocks",
    "rollout/engine",
    "rollout/requests",
)
LAST_TESTS = ("tests/engine", "tests/walks")
# Imported once: every run forks from a process that has them, and none of the code under test.
PRELOADED = ("torch", "numpy", "hypothesis", "pytest", "msgspec", "zmq", "transformers")
KILLED, TIMED_OUT = "killed", "killed by time"
SURVIVED, OUT_OF_BUDGET = "survived", "survived the budget"
_TEST_LIMIT_S = 120
_INTERRUPTED = 2  # pytest's exit status

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change. `place` is the index of its node in the order in which `ast.walk` yields them."""

    path: str
    line: int
    place: int
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Whether a test noticed: KILLED, TIMED_OUT, SURVIVED all tests or OUT_OF_BUDGET."""

    mutant: Mutant
    fate: str
    cpu_s: float


class CpuBudget:
    """A pytest plugin that ends a run, between two tests, once its tests have used the budget.

    CPU seconds of this process from the first test on, and of child processes that have ended.
    Tests that are marked with a timeout above the usual one come last: one of them alone may take
    longer than the budget.
    """

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._start_s = _cpu_s()
        self._has_timed_out = False
        self._is_spent = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=_takes_long)
        self._start_s = _cpu_s()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_timeout = report.failed and "from pytest-timeout" in str(report.longrepr)
        self._has_timed_out = self._has_timed_out or is_timeout

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if self.used_s >= self._budget_s:
            self._is_spent = True
            item.session.shouldstop = "the CPU budget is spent"

    @property
    def used_s(self) -> float:
        return _cpu_s() - self._start_s

    def fate(self, status: int) -> str:
        """Return what the exit status of pytest means. A failing last test outweighs the budget."""
        if status == 0:
            return SURVIVED
        if self._is_spent and status == _INTERRUPTED:
            return OUT_OF_BUDGET
        return TIMED_OUT if self._has_timed_out else KILLED


def _takes_long(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("timeout")
    return mark is not None and mark.args[0] > _TEST_LIMIT_S


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def changed(node: ast.AST) -> ast.AST | None:
    """Return another node in place of `node`; None if this kind is left alone."""
    other = copy.deepcopy(node)
    match other:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            other.ops = [_COMPARISONS[type(op)]()]
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _OPERATORS:
            other.op = _OPERATORS[type(op)]()
        case ast.BoolOp(op=op):
            other.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            return other.operand
        case ast.If() | ast.IfExp() | ast.While():
            other.test = ast.UnaryOp(op=ast.Not(), operand=other.test)
        case ast.Constant(value=bool(value)):
            other.value = not value
        case ast.Constant(value=int(value)):
            other.value = value + 1
        case ast.Expr(value=ast.Call(func=call)) if "logger" not in ast.unparse(call):
            return ast.Pass()
        case _:
            return None
    return other


def _left_alone(tree: ast.AST) -> set[int]:
    """The ids of nodes that are left alone: types, decorators, messages, assertions."""
    alone: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                parts = [node.returns, *node.decorator_list]
            case ast.ClassDef():
                parts = [*node.decorator_list, *node.keywords]
            case ast.arg() | ast.AnnAssign():
                parts = [node.annotation]
            case ast.Raise() | ast.Assert() | ast.JoinedStr():
                parts = [node]
        alone.update(id(inner) for part in parts if part is not None for inner in ast.walk(part))
    return alone


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Yield all mutants of one file."""
    tree = ast.parse(source)
    alone = _left_alone(tree)
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in alone or not isinstance(node, (ast.expr, ast.stmt)):
            continue
        if (other := changed(node)) is not None:
            before, after = (ast.unparse(part).partition("\n")[0] for part in (node, other))
            yield Mutant(path=path, line=node.lineno, place=place, before=before, after=after)


def mutated(source: str, mutant: Mutant) -> str:
    """Return the source with the mutant's change."""
    tree = ast.parse(source)
    target = next(node for place, node in enumerate(ast.walk(tree)) if place == mutant.place)

    class Change(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return changed(node) or node if node is target else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Change().visit(tree)))


def drawn(packages: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return up to `count` mutants of the packages, each as likely as any other."""
    paths = sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))
    everyone = [
        mutant
        for path in paths
        for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text())
    ]
    return random.Random(seed).sample(everyone, min(count, len(everyone)))


def tests_for(mutant: Mutant) -> list[str]:
    """The tests to run, those of the mutant's own package first."""
    package = Path(mutant.path).parts[1]
    own = [f"tests/{package}"] if (ROOT / "tests" / package).is_dir() else []
    return list(dict.fromkeys([*own, *LAST_TESTS]))


def _run_tests(tree: str, tests: Sequence[str], budget_s: float, result: Connection) -> None:
    """In a forked process: send (fate, CPU seconds)."""
    os.setsid()  # what the tests start is killed with them
    os.chdir(tree)
    sys.path.insert(0, tree)
    os.environ["PYTHONPATH"] = tree
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    import pytest

    options = ["-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    budget = CpuBudget(budget_s)
    status = pytest.main([*options, f"--timeout={_TEST_LIMIT_S}", *tests], plugins=[budget])
    result.send((budget.fate(status), budget.used_s))


def run(
    tree: Path, mutant: Mutant | None, tests: Sequence[str], *, budget_s: float, limit_s: float
) -> tuple[str, float]:
    """Test one mutant in a copy of the tree, or the copy as it is. Returns (fate, CPU seconds)."""
    path = tree / (mutant.path if mutant is not None else "pyproject.toml")
    source = path.read_text()
    if mutant is not None:
        path.write_text(mutated(source, mutant))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("forkserver").Process(
        target=_run_tests, args=(str(tree), tests, budget_s, sender)
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.join()
        path.write_text(source)


def copies(folder: str, count: int) -> list[Path]:
    """Copy the tracked files `count` times, so that mutants can be tested side by side."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    trees = [Path(folder, str(number)) for number in range(count)]
    for tree in trees:
        for name in listed:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    return trees


def run_unchanged(
    mutants: Sequence[Mutant], tree: Path, budget_s: float, limit_s: float
) -> dict[str, float]:
    """Return the CPU seconds of each list of tests without a mutant, named after its first folder.

    Raises SystemExit if a test fails.
    """
    used_s = {}
    for tests in sorted({tuple(tests_for(mutant)) for mutant in mutants}):
        fate, used_s[tests[0]] = run(tree, None, tests, budget_s=budget_s, limit_s=limit_s)
        if fate not in (SURVIVED, OUT_OF_BUDGET):
            raise SystemExit(f"without a mutant, {' '.join(tests)} were {fate}")
    return used_s


def run_all(
    mutants: Sequence[Mutant], trees: Sequence[Path], budget_s: float, limit_s: float
) -> Iterator[Outcome]:
    """Test the mutants, as many at a time as there are trees, beside a progress bar."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(mutant: Mutant) -> Outcome:
        tree = free.get()
        try:
            fate, cpu_s = run(tree, mutant, tests_for(mutant), budget_s=budget_s, limit_s=limit_s)
        finally:
            free.put(tree)
        return Outcome(mutant=mutant, fate=fate, cpu_s=cpu_s)

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
        SURVIVED: fates[SURVIVED] + fates[OUT_OF_BUDGET],
        OUT_OF_BUDGET: fates[OUT_OF_BUDGET],
        "share killed": num_killed / len(outcomes) if outcomes else 0.0,
    }


def write(path: Path, seed: int, outcomes: Sequence[Outcome]) -> None:
    """Write all outcomes so far as JSON."""
    listed = [asdict(outcome) for outcome in outcomes]
    path.write_text(json.dumps({"seed": seed, **summary(outcomes), "outcomes": listed}))


def report(console: Console, seed: int, outcomes: Sequence[Outcome]) -> None:
    """Print the mutants that survived, by line, and the number of each fate."""
    for outcome in sorted(outcomes, key=lambda o: (o.mutant.path, o.mutant.line)):
        if outcome.fate in (SURVIVED, OUT_OF_BUDGET):
            mutant = outcome.mutant
            line = f"{mutant.path}:{mutant.line}: {mutant.before} -> {mutant.after}"
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
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    os.environ["ROLLOUT_TEST_SEED"] = str(seed)
    with tempfile.TemporaryDirectory(prefix="rollout-mutants-") as folder:
        trees = copies(folder, given.jobs)
        used_s = run_unchanged(mutants, trees[0], given.budget_s, given.limit_s)
        for name, cpu_s in used_s.items():
            console.print(f"without a mutant, {name} first: {cpu_s:.0f} CPU seconds")
        outcomes: list[Outcome] = []
        for outcome in run_all(mutants, trees, given.budget_s, given.limit_s):
            outcomes.append(outcome)
            if given.out is not None:
                write(given.out, seed, outcomes)
    report(console, seed, outcomes)


if __name__ == "__main__":
    main()
