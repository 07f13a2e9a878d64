"""A child of os.fork has none of its parent's threads, and does not wait for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.distributed
def test_an_llm_used_on_threads_works_in_a_forked_child() -> None:
    """In a program of its own: a fork of pytest would take all of it along."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.scenarios.forked_llm"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "engine in the child": "ok",
        "engine in the parent": "ok",
        "old OpenMP in the child": "ok",
        "fleet in the child": "ok",
    }, done.stderr
