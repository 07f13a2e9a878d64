"""The figures of real runs, recomputed from the rollouts and from a clock that a listener reads.

Training moves the clock by known seconds: the job's scheduler once in each step, and the reward
function at each call. Each row reaches the listener, a wandb run, as the step's time is taken.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers")

from tests.installed import needs
from tests.trainer_hooks.fakes import FakeWandbRun
from tests.trainer_hooks.train.grpo_settings import tiny_settings
from trainer_hooks.metrics import read_jsonl
from trainer_hooks.train import Dashboard, run_files
from trainer_hooks.train.main import run_seed

pytestmark = needs("reasoning_gym")

NAME = "tests.trainer_hooks.train.test_figures_of_runs"
now = [0.0]


class MovesTheClock(torch.optim.lr_scheduler.ConstantLR):
    """A constant rate, whose step number n takes n seconds."""

    def step(self, epoch: int | None = None) -> None:
        super().step()
        now[0] += self.last_epoch


async def num_kinds(completions: Sequence[str]) -> list[float]:
    """Return the number of different letters per completion, after a quarter of a second.

    The event loop calls it, so it moves the clock at no other time than between two awaits.
    """
    now[0] += 0.25
    return [float(len(set(completion))) for completion in completions]


class Listener(FakeWandbRun):
    """A wandb run that reads the clock at each row."""

    def __init__(self) -> None:
        super().__init__()
        self.times_s: list[float] = []

    def log(self, data: dict[str, Any]) -> None:
        super().log(data)
        self.times_s.append(now[0])


def change_of(values: list[float]) -> str:
    return f"{values[0]:.3f} → {values[-1]:.3f}"


def shown_by_the_dashboard(rows: list[dict[str, Any]]) -> str:
    dashboard, output = Dashboard(Console(file=io.StringIO(), width=120)), io.StringIO()
    for row in rows:
        dashboard.show(row)
    Console(file=output, width=120).print(dashboard.render(120))
    return output.getvalue()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mode", ["sync", "colocated", "async"])
def test_figures_of_a_run_in_all_five_places_equal_its_rollouts_and_clock(
    mode: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = Listener()
    monkeypatch.setattr(run_files, "start_wandb_run", lambda **_: listener)
    settings = tiny_settings(
        mode=mode,
        warmup="none",
        reward=f"{NAME}:num_kinds",
        trainer__num_steps=5,
        trainer__scheduler=f"{{path: '{NAME}:MovesTheClock'}}",
        logger="wandb",
        logger__num_samples=0,
    )
    written = run_seed(tmp_path, settings, seed=0, clock=lambda: now[0])

    samples = read_jsonl(tmp_path / "completions.jsonl")
    by_step = [[s for s in samples if s["trainer/step"] == i + 1] for i in range(5)]
    assert [len(own) for own in by_step] == [12] * 5, "all rollouts of each step"
    tokens = [sum(sample["num_tokens"] for sample in own) for own in by_step]
    rewards = [fmean(sample["reward"] for sample in own) for own in by_step]
    # The first row is that of the evaluation before training.
    seconds = [end - start for start, end in pairwise(listener.times_s[:6])]
    assert all(own >= step for step, own in enumerate(seconds, start=1))
    rates = [num / own for num, own in zip(tokens, seconds, strict=True)]
    tokens_per_s, step_s = sum(tokens) / sum(seconds), fmean(seconds)
    first, last = fmean(rewards[:2]), fmean(rewards[-2:])

    rows = read_jsonl(tmp_path / "metrics.jsonl")
    steps = [row for row in rows if "reward" in row]
    assert [row["timing_s/step"] for row in steps] == pytest.approx(seconds)
    assert [row["completions/tokens_per_s"] for row in steps] == pytest.approx(rates)

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == written == listener.summary
    figures = ("tokens_per_s", "step_s", "training_s", "sampled_reward_first", "sampled_gain")
    assert [summary[name] for name in figures] == pytest.approx(
        [tokens_per_s, step_s, sum(seconds), first, last - first]
    )
    assert summary["num_held_out"] == 4

    drawn = [row for row in listener.rows if "reward" in row]
    assert [row["completions/tokens_per_s"] for row in drawn] == pytest.approx(rates)

    page = (tmp_path / "report.html").read_text()
    held_out = [row["eval/greedy_reward"] for row in rows if "eval/greedy_reward" in row]
    for cell in (
        f"{change_of([first, last])} (2 steps each)",
        f"{tokens_per_s:,.0f}",
        f"{step_s:.2f} s",
        f"{change_of(held_out)} (n=4)",
    ):
        assert f"<td>{cell}</td>" in page

    shown = shown_by_the_dashboard(rows)
    assert f"time of a step: {step_s:.2f} s" in shown
    assert f"{rates[-1]:,.0f} tokens/s sampled" in shown
    assert f"held out {held_out[-1]:.3f} (n=4)" in shown
    assert f"{rates[-1]:,.0f} tokens/s" in capsys.readouterr().out
