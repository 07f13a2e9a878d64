from __future__ import annotations

import ast

from scripts.mutants import PACKAGES, ROOT, drawn, mutants_of, mutated, run

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


def test_a_change_is_noticed_and_taken_back(tmp_path) -> None:
    source = "def successor(number):\n    return number + 1\n"
    (tmp_path / "successor.py").write_text(source)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow', 'gpu']")
    (tmp_path / "test_successor.py").write_text(
        "from successor import successor\n\n\ndef test_it():\n    assert successor(1) == 2\n"
    )
    for mutant in mutants_of("successor.py", source):
        assert run(tmp_path, mutant, ["test_successor.py"], 60.0) == "killed"
    assert (tmp_path / "successor.py").read_text() == source
    assert run(tmp_path, None, ["test_successor.py"], 60.0) == "survived"
