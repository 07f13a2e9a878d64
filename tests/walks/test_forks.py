"""A child of os.fork has none of its parent's threads, and does not wait for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Of forks in a program of its own: a fork of pytest would take all of it along."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.walks.forked_llm"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "what",
    [
        "engine in the child",
        "engine in the parent",
        "old OpenMP in the child",
        "fleet in the child",
    ],
)
def test_an_llm_that_was_used_on_threads_answers_after_a_fork(
    outcomes: dict[str, str], what: str
) -> None:
    assert outcomes[what] == "ok"
