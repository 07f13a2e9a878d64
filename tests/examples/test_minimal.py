"""The two minimal programs learn, in each setting, and stand in their pages as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


def rewards_of(program: str, *arguments: str) -> list[float]:
    """The reward of each step that `program` prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / program), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(reward) for reward in re.findall(r"reward (\S+)", done.stdout)]


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("grpo_minimal.py", []),
        ("async_minimal.py", ["--in-process", "--suspend"]),
        ("async_minimal.py", []),
        pytest.param("async_minimal.py", ["--in-process"], marks=pytest.mark.slow),
        pytest.param("async_minimal.py", ["--suspend"], marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_minimal_program_learns(program: str, arguments: list[str]) -> None:
    rewards = rewards_of(program, *arguments)
    assert len(rewards) == 40
    assert sum(rewards[:5]) / 5 < 0.25
    assert sum(rewards[-5:]) / 5 > 0.5


@pytest.mark.parametrize(
    ("program", "page"),
    [("grpo_minimal.py", "README.md"), ("async_minimal.py", "docs/producer.md")],
)
def test_a_page_quotes_the_program_whole(program: str, page: str) -> None:
    source = (ROOT / "examples" / program).read_text(encoding="utf-8")
    text = (ROOT / page).read_text(encoding="utf-8")
    assert f"```python\n{source}```\n" in text, f"copy examples/{program} into {page}"
