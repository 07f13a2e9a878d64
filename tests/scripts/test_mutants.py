from __future__ import annotations

import ast

import pytest

from scripts.mutants import (
    KILLED,
    OUT_OF_BUDGET,
    PACKAGES,
    ROOT,
    SURVIVED,
    TIMED_OUT,
    Mutant,
    Outcome,
    drawn,
    mutants_of,
    mutated,
    run,
    run_unchanged,
    summary,
)

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


@pytest.fixture
def tree(tmp_path):
    """A tree of one module; a test adds its tests of it."""
    (tmp_path / "successor.py").write_text(SUCCESSOR)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow', 'gpu']")
    return tmp_path


def fate(tree, tests: str, mutant=None, *, budget_s: float = 60.0, limit_s: float = 60.0) -> str:
    (tree / "test_successor.py").write_text(tests)
    return run(tree, mutant, ["test_successor.py"], budget_s=budget_s, limit_s=limit_s)[0]


def test_a_change_is_noticed_and_taken_back(tree) -> None:
    for mutant in mutants_of("successor.py", SUCCESSOR):
        assert fate(tree, GOOD_TEST, mutant) == KILLED
    assert (tree / "successor.py").read_text() == SUCCESSOR
    assert fate(tree, GOOD_TEST) == SURVIVED


def test_no_test_begins_once_the_budget_is_spent(tree) -> None:
    tests = BUSY_TEST + FAILING_TEST
    assert fate(tree, tests, budget_s=BUSY_S / 2) == OUT_OF_BUDGET
    assert fate(tree, tests) == KILLED


def test_what_is_marked_as_long_comes_last(tree) -> None:
    long = "import pytest\n\n@pytest.mark.timeout(600)" + BUSY_TEST.replace("import time", "")
    tests = "import time\n" + long + FAILING_TEST
    assert fate(tree, tests, budget_s=BUSY_S / 2) == KILLED


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


def test_the_unchanged_tree_has_to_pass(tree) -> None:
    mutant = Mutant(path="rollout/nowhere/x.py", line=1, place=0, before="", after="")
    with pytest.raises(SystemExit, match="without a mutant"):
        run_unchanged([mutant], tree, 60.0, 60.0)


def test_mutants_that_survive_a_spent_budget_count_as_survivors() -> None:
    mutant = Mutant(path="x.py", line=1, place=0, before="", after="")
    fates = [KILLED, KILLED, TIMED_OUT, SURVIVED, OUT_OF_BUDGET]
    assert summary([Outcome(mutant=mutant, fate=fate, cpu_s=1.0) for fate in fates]) == {
        "mutants": 5,
        KILLED: 2,
        TIMED_OUT: 1,
        SURVIVED: 2,
        OUT_OF_BUDGET: 1,
        "share killed": 0.6,
    }
