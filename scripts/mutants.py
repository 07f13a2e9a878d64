"""How much the tests catch: change the code in one place at a time, and see whether a test fails.

    python scripts/mutants.py --count 300 --jobs 2          # hours on two slow cores
    python scripts/mutants.py --count 20 --seed 7 rollout/blocks

A mutant is one changed comparison, operator, condition, number or flag, or one call left out, drawn
at random from the packages named. Each is tested in a copy of the tree, by the tests of its package
first and then by those of the engine and the walks; the first failure kills it, and so does a run
that exceeds its time. Mutants that survive are listed with their line: each is a fault that no test
would notice, or a change that means nothing. Writes a JSON file if `--out` says where.
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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "rollout/scheduling",
    "rollout/blocks",
    "rollout/engine",
    "rollout/requests",
)
LAST_TESTS = ("tests/engine", "tests/walks")
# Imported once: every run forks from a process that has them, and none of the code under test.
PRELOADED = ("torch", "numpy", "hypothesis", "pytest", "msgspec", "zmq")
LIMIT_S = 300.0

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
    """Whether a test noticed: "killed", "killed by time" or "survived"."""

    mutant: Mutant
    fate: str
    seconds: float


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


def _run_tests(tree: str, tests: Sequence[str]) -> None:
    """In a forked process: end with pytest's exit status."""
    os.setsid()  # what the tests start is killed with them
    os.chdir(tree)
    sys.path.insert(0, tree)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    import pytest

    options = ["-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider", "--timeout=120"]
    sys.exit(int(pytest.main([*options, *tests])))


def run(tree: Path, mutant: Mutant | None, tests: Sequence[str], limit_s: float) -> str:
    """Test one mutant in a copy of the tree, or the copy as it is; returns its fate."""
    path = tree / (mutant.path if mutant is not None else "pyproject.toml")
    source = path.read_text()
    if mutant is not None:
        path.write_text(mutated(source, mutant))
    process = multiprocessing.get_context("forkserver").Process(
        target=_run_tests, args=(str(tree), tests)
    )
    try:
        process.start()
        process.join(limit_s)
        if process.exitcode is None:
            return "killed by time"
        return "survived" if process.exitcode == 0 else "killed"
    finally:
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


def test_all(mutants: Sequence[Mutant], trees: Sequence[Path], limit_s: float) -> list[Outcome]:
    """Test the mutants, as many at a time as there are trees, beside a progress bar."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(mutant: Mutant) -> Outcome:
        tree, began_at = free.get(), time.monotonic()
        try:
            fate = run(tree, mutant, tests_for(mutant), limit_s)
        finally:
            free.put(tree)
        return Outcome(mutant=mutant, fate=fate, seconds=time.monotonic() - began_at)

    columns = (TextColumn("mutants"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar, ThreadPoolExecutor(len(trees)) as pool:
        task = bar.add_task("", total=len(mutants))
        outcomes = []
        for future in as_completed([pool.submit(one, mutant) for mutant in mutants]):
            outcomes.append(future.result())
            bar.advance(task)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="folders of the code")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None, help="draws the same mutants again")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for each mutant")
    parser.add_argument("--out", type=Path, help="JSON file of all outcomes")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().getrandbits(31) if given.seed is None else given.seed
    console = Console()
    mutants = drawn(given.packages, given.count, seed)
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    os.environ["ROLLOUT_TEST_SEED"] = str(seed)
    with tempfile.TemporaryDirectory(prefix="rollout-mutants-") as folder:
        trees = copies(folder, given.jobs)
        outcomes = test_all(mutants, trees, given.limit_s)
    for outcome in sorted(outcomes, key=lambda o: (o.mutant.path, o.mutant.line)):
        if outcome.fate == "survived":
            mutant = outcome.mutant
            console.print(
                f"{mutant.path}:{mutant.line}: {mutant.before} -> {mutant.after}",
                markup=False,
                highlight=False,
            )
    fates = Counter(outcome.fate for outcome in outcomes)
    share = 1 - fates["survived"] / len(outcomes) if outcomes else 0.0
    console.print(f"seed {seed}: {dict(fates)}; {share:.1%} of {len(outcomes)} killed")
    if given.out is not None:
        listed = [asdict(outcome) for outcome in outcomes]
        given.out.write_text(json.dumps({"seed": seed, "killed": share, "mutants": listed}))


if __name__ == "__main__":
    main()
