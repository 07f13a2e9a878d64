"""Without Linux's own calls everything imports, and unsupported features say so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# The process compiles kernels for a processor that it cannot look up: minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.scenarios.without_linux"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_module_imports_except_those_that_need_triton(outcomes: dict[str, Any]) -> None:
    for module, error in outcomes["failed imports"].items():
        assert module.startswith("rollout.backends."), (module, error)
        assert re.search("ModuleNotFoundError.*triton", error), (module, error)


def test_an_engine_generates_across_a_suspend(outcomes: dict[str, Any]) -> None:
    assert outcomes["generated"] == 8


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("reserved", "ConfigError: memory_kind='reserved' needs Linux.*memory_kind='device'"),
        ("publish", "WeightUpdateError: .*needs Linux.*LLM without use_coordinator"),
    ],
)
def test_unsupported_features_name_the_system_and_the_remedy(
    outcomes: dict[str, Any], what: str, message: str
) -> None:
    assert re.search(message, outcomes[what]), outcomes[what]
