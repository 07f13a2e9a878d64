"""The minimal programs learn, in each setting, and stand in their pages as they are."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


def check_learned(printed: str) -> None:
    rewards = [float(reward) for reward in re.findall(r"reward (\S+)", printed)]
    assert len(rewards) == 40
    assert sum(rewards[:5]) / 5 < 0.25
    assert sum(rewards[-5:]) / 5 > 0.5


def test_the_readmes_program_learns_in_a_shell() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "grpo_minimal.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check_learned(done.stdout)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--in-process", "--suspend"],
        [],
        pytest.param(["--in-process"], marks=pytest.mark.slow),
        pytest.param(["--suspend"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_the_asynchronous_program_learns(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported what takes longer than the training."""
    program = str(ROOT / "examples" / "async_minimal.py")
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    runpy.run_path(program, run_name="__main__")
    check_learned(capsys.readouterr().out)


@pytest.mark.slow
def test_two_ranks_of_a_trainer_learn_under_torchrun() -> None:
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 examples/ranks_minimal.py"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check_learned(done.stdout)


@pytest.mark.parametrize(
    ("program", "page"),
    [
        ("grpo_minimal.py", "docs/how-to/training-loop.md"),
        ("async_minimal.py", "docs/producer.md"),
        ("ranks_minimal.py", "docs/tensor_parallel.md"),
    ],
)
def test_a_page_quotes_the_program_whole(program: str, page: str) -> None:
    source = (ROOT / "examples" / program).read_text(encoding="utf-8")
    text = (ROOT / page).read_text(encoding="utf-8")
    assert f"```python\n{source}```\n" in text, f"copy examples/{program} into {page}"
