"""Sums in files of one's own: what the files hold, and that the job learns from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from examples import arithmetic
from trainer_hooks.metrics import read_jsonl

ROOT = Path(__file__).parents[2]


def test_a_pupil_who_forgets_to_carry_adds_column_by_column() -> None:
    sums = [(12, 34), (37, 45), (75, 45), (90, 10), (99, 99)]
    assert [arithmetic.forget_carries(a, b) for a, b in sums] == [46, 72, 10, 0, 88]


def test_no_sum_that_is_held_out_is_asked_elsewhere_and_only_the_homework_has_mistakes(
    tmp_path: Path,
) -> None:
    arithmetic.main(tmp_path)
    held_out, questions, homework = (
        read_jsonl(tmp_path / f"{name}.jsonl") for name in ("held_out", "questions", "homework")
    )
    assert (len(held_out), len(held_out) + len(questions)) == (200, 8100)
    right = {row["prompt"]: row["answer"] for row in held_out + questions}
    assert len(right) == 8100
    assert right["What is 37 + 45?"] == "082"
    assert not {row["prompt"] for row in held_out} & {row["prompt"] for row in homework}
    wrong = [row for row in homework if row["answer"] != right[row["prompt"]]]
    assert 0.52 < len(wrong) / len(homework) < 0.60, "three in four of the sums that carry"


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["mode=async", "producer.order=ready"]], ids=" ".join)
def test_the_job_learns_to_carry(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "outputs").mkdir()
    arithmetic.main(tmp_path / "outputs" / "sums")
    fewer = ["trainer.num_steps=40", "logger=quiet"]
    config = ["--config-dir", str(ROOT / "examples"), "--config-name", "sums"]
    done = subprocess.run(
        [sys.executable, "-m", "trainer_hooks.train", *config, *fewer, *how],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "outputs/train/sums/seed_0/summary.json").read_text())
    assert summary["greedy_gain"] > 0.25
    assert summary["sampled_gain"] > 0.1, "ten steps against the last ten"
    assert summary["max_staleness"] == 1
