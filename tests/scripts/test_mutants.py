from __future__ import annotations

import ast
import re

import pytest

from scripts.mutants import (
    KILLED,
    NOT_COVERED,
    OUT_OF_BUDGET,
    PACKAGES,
    ROOT,
    SURVIVED,
    TIMED_OUT,
    Outcome,
    drawn,
    fate_of,
    run,
    summary,
    trace,
)
from scripts.mutation import Mutant, mutants_of, mutated
from scripts.traced_tests import TracedTests

SOURCE = '''
"""1 + 1 in a docstring."""
from dataclasses import dataclass


@dataclass(slots=True)
class Pool:
    size: tuple[int, int] = (1, 2)

    def take(self, count: int) -> bool:
        if count < 0 or self.is_full:
            raise ValueError(f"{count + 1} is wrong")
        self.size.append(count)
        if not self.is_full:
            self.grow()
        return count - 1 >= 3
'''

MUTANT = Mutant(path="x.py", line=1, start=1, end=1, place=0, before="", after="")
SUCCESSOR = "def successor(number):\n    return number + 1\n"
GOOD_TEST = """
from successor import successor

def test_it():
    assert successor(1) == 2
"""
FAILING_TEST = """
def test_failing():
    assert False
"""
BUSY_S = 0.5
BUSY_CODE = f"import time\nwhile time.process_time() < {BUSY_S}: pass"
BUSY_TEST = f"""
import time

def test_busy():
    start = time.process_time()
    while time.process_time() - start < {BUSY_S}:
        pass
"""


def test_the_changes_are_those_that_a_test_should_notice() -> None:
    assert {(m.before, m.after) for m in mutants_of("pool.py", SOURCE)} == {
        ("1", "2"),
        ("2", "3"),
        ("0", "1"),
        ("3", "4"),
        ("if count < 0 or self.is_full:", "if not (count < 0 or self.is_full):"),
        ("count < 0 or self.is_full", "count < 0 and self.is_full"),
        ("count < 0", "count <= 0"),
        ("if not self.is_full:", "if not not self.is_full:"),
        ("not self.is_full", "self.is_full"),
        ("self.size.append(count)", "pass"),
        ("self.grow()", "pass"),
        ("count - 1 >= 3", "count - 1 > 3"),
        ("count - 1", "count + 1"),
    }


def test_each_mutant_differs_from_the_source_and_from_the_others() -> None:
    texts = [mutated(SOURCE, mutant) for mutant in mutants_of("pool.py", SOURCE)]
    assert len({*texts, ast.unparse(ast.parse(SOURCE))}) == len(texts) + 1


def test_a_seed_draws_the_same_mutants_again() -> None:
    assert drawn(PACKAGES, 20, 7) == drawn(PACKAGES, 20, 7) != drawn(PACKAGES, 20, 8)
    assert all((ROOT / mutant.path).is_file() for mutant in drawn(PACKAGES, 20, 7))


def test_a_statement_ends_where_the_statements_inside_of_it_begin() -> None:
    source = """
def total(numbers,
          start=1):
    if (start > 1
            and numbers):
        return 2
    return sum(
        numbers,
        3,
    )
"""
    lines = {(m.before, m.start, m.end) for m in mutants_of("total.py", source)}
    assert {("1", 2, 3), ("1", 4, 5), ("start > 1", 4, 5), ("2", 6, 6), ("3", 7, 10)} <= lines


@pytest.fixture
def tree(tmp_path):
    """A tree of one module; a test adds its tests of it."""
    (tmp_path / "successor.py").write_text(SUCCESSOR)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow', 'gpu']")
    return tmp_path


def fate(tree, tests: str, mutant=None, *, budget_s: float = 60.0, limit_s: float = 60.0) -> str:
    """The fate by tests that run in their order in the file."""
    (tree / "test_successor.py").write_text(tests)
    names = [f"test_successor.py::{name}" for name in re.findall(r"^def (test_\w+)", tests, re.M)]
    cpu_s = {name: 0.001 * place for place, name in enumerate(names)}
    return run(tree, mutant, cpu_s, budget_s=budget_s, limit_s=limit_s)[0]


def test_a_change_is_noticed_and_taken_back(tree) -> None:
    for mutant in mutants_of("successor.py", SUCCESSOR):
        assert fate(tree, GOOD_TEST, mutant) == KILLED
    assert (tree / "successor.py").read_text() == SUCCESSOR
    assert fate(tree, GOOD_TEST) == SURVIVED


def test_no_test_begins_once_the_budget_is_spent(tree) -> None:
    tests = BUSY_TEST + FAILING_TEST
    assert fate(tree, tests, budget_s=BUSY_S / 2) == OUT_OF_BUDGET
    assert fate(tree, tests) == KILLED


def test_the_cheapest_test_comes_first_and_no_others_run_than_those_named(tree) -> None:
    (tree / "test_successor.py").write_text(
        BUSY_TEST + FAILING_TEST + FAILING_TEST.replace("test_failing", "test_other")
    )
    busy, failing = "test_successor.py::test_busy", "test_successor.py::test_failing"
    limits = {"budget_s": BUSY_S / 2, "limit_s": 60.0}
    assert run(tree, None, {busy: 2.0, failing: 1.0}, **limits)[0] == KILLED
    assert run(tree, None, {busy: 2.0, failing: 3.0}, **limits)[0] == OUT_OF_BUDGET
    assert run(tree, None, {busy: 2.0}, budget_s=60.0, limit_s=60.0)[0] == SURVIVED


def test_a_failure_counts_although_it_spends_the_budget(tree) -> None:
    assert fate(tree, FAILING_TEST, budget_s=0.0) == KILLED


def test_a_child_process_spends_the_budget_as_well(tree) -> None:
    in_child = f"""
def test_child():
    subprocess.run([sys.executable, "-c", {BUSY_CODE!r}], check=True)
"""
    tests = "import subprocess, sys\n" + in_child + FAILING_TEST
    assert fate(tree, tests, budget_s=BUSY_S / 2) == OUT_OF_BUDGET


def test_a_module_that_cannot_be_imported_is_noticed(tree) -> None:
    assert fate(tree, "import nowhere\n" + GOOD_TEST, budget_s=0.0) == KILLED


def test_a_test_that_hangs_ends_by_its_own_timeout_or_by_the_limit(tree) -> None:
    hanging = "import time\nimport pytest\n\n{}\ndef test_it():\n    time.sleep(600)\n"
    assert fate(tree, hanging.format("@pytest.mark.timeout(0.1)")) == TIMED_OUT
    assert fate(tree, hanging.format(""), limit_s=0.5) == TIMED_OUT


def test_a_crash_is_noticed(tree) -> None:
    assert fate(tree, "import os\n\ndef test_it():\n    os.abort()\n") == KILLED


SHOP = """
PRICE = 3

def price(count):
    if count > 9:
        return PRICE * count - 1
    return PRICE * count

def discount():
    return 1
"""
SHOP_TESTS = """
import subprocess
from shop.prices import price

def test_one():
    assert price(1) == 3

def test_many():
    assert price(10) == 29
    sum(range(3_000_000))

def test_child():
    subprocess.run("true", check=True)  # shorter than a tick of the clock

def test_arithmetic():
    assert 1 + 1 == 2
"""


def test_a_mutant_is_tested_by_what_executes_its_statement(tree) -> None:
    path = tree / "shop" / "prices.py"
    path.parent.mkdir()
    path.write_text(SHOP)
    (tree / "test_shop.py").write_text(SHOP_TESTS)
    traced, environment, modules = trace(tree, ["shop"], ["test_shop.py"])
    assert environment["PYTHONPATH"] == str(tree)
    assert "pytest" in modules
    assert "shop.prices" not in modules
    names = {mutant.line: mutant for mutant in mutants_of("shop/prices.py", SHOP)}
    one, many, child = (f"test_shop.py::test_{name}" for name in ("one", "many", "child"))
    assert set(traced.tests_of(names[2])) == {one, many, child}  # executed at import
    assert set(traced.tests_of(names[5])) == {one, many, child}
    assert set(traced.tests_of(names[6])) == {many, child}
    assert set(traced.tests_of(names[7])) == {one, child}
    assert not traced.tests_of(names[10])
    assert traced.cpu_s[one] < traced.cpu_s[many]
    fates = {line: fate_of(names[line], traced, tree, 60.0, 60.0).fate for line in (6, 10)}
    assert fates == {6: KILLED, 10: NOT_COVERED}


def test_the_unchanged_tree_has_to_pass(tree) -> None:
    (tree / "test_failing.py").write_text(FAILING_TEST)
    with pytest.raises(SystemExit, match="without a mutant"):
        trace(tree, ["shop"], ["test_failing.py"])


def test_a_test_that_exceeds_the_budget_is_left_out(tree) -> None:
    (tree / "test_failing.py").write_text(FAILING_TEST)
    name = "test_failing.py::test_failing"
    lines = {"successor.py": {2: {name}}}
    traced = TracedTests(cpu_s={name: 5.0}, tests_by_line=lines)
    mutant = next(iter(mutants_of("successor.py", SUCCESSOR)))
    assert fate_of(mutant, traced, tree, 4.0, 60.0).fate == OUT_OF_BUDGET
    assert fate_of(mutant, traced, tree, 6.0, 60.0).fate == KILLED


def test_every_mutant_that_is_not_killed_counts_as_a_survivor() -> None:
    fates = [KILLED, KILLED, KILLED, TIMED_OUT, SURVIVED, OUT_OF_BUDGET, NOT_COVERED, NOT_COVERED]
    assert summary([Outcome(mutant=MUTANT, fate=fate, cpu_s=1.5) for fate in fates]) == {
        "mutants": 8,
        KILLED: 3,
        TIMED_OUT: 1,
        SURVIVED: 4,
        OUT_OF_BUDGET: 1,
        NOT_COVERED: 2,
        "share killed": 0.5,
        "mean CPU s": 1.5,
    }
