"""Summaries of runs whose rows are made by hand."""

import io
import math
import re

import pytest
from rich.console import Console
from rich.table import Table

from trainer_hooks.train.summary import answers_table, seeds_table, summarise, summary_table


def rows(num_steps: int) -> list[dict[str, float]]:
    step = {
        "train/num_tokens": 100,
        "train/num_stale_tokens": 25,
        "policy_staleness/max": 1.0,
        "policy_staleness/num_mixed_rollouts": 3,
        "completions/num_tokens": 300,
        "prompts/num_tokens": 80,
        "timing_s/update": 0.1,
        "timing_s/resume": 0.2,
        "timing_s/generate": 0.5,
        "timing_s/suspend": 0.3,
        "timing_s/train": 2.0,
        "timing_s/step": 4.0,
    }
    return [
        {"warmup/step": 1, "warmup/loss": 1.0, "timing_s/warmup": 5.0},
        {"warmup/step": 2, "warmup/loss": 0.5, "warmup/reward": 0.25, "timing_s/warmup": 9.0},
        {"eval/greedy_reward": 0.5},
        {"engine/step": 3},
        *(
            {
                **step,
                "reward": index / 100,
                "engine/num_prefill_tokens": 50 + 10 * (index % 30),
                "engine/num_suspends": index,
                "engine/suspended_bytes": index * 2**21,
            }
            for index in range(num_steps)
        ),
        {"eval/greedy_reward": 0.75, "eval/num_prompts": 32.0},
    ]


def test_summarise_equals_figures_computed_by_hand() -> None:
    summary = summarise(rows(50), seed=3)
    assert summary["sampled_reward_first"] == pytest.approx(0.045)
    assert summary["sampled_reward_last"] == pytest.approx(0.445)
    assert summary["sampled_gain"] == pytest.approx(0.4)
    assert summary["greedy_gain"] == 0.25
    assert (summary["warmup_steps"], summary["warmup_sampled_reward"], summary["warmup_s"]) == (
        2,
        0.25,
        9.0,
    )
    assert summary["stale_token_fraction"] == 0.25
    assert summary["rollouts_across_updates"] == 150
    assert (summary["num_suspends"], summary["suspends_released_mib"]) == (49, 49 * 2)
    assert summary["prompt_tokens"] == 49 * 80
    # 29 steps of 10, a restart that begins with 50, 19 steps of 10.
    assert summary["prefilled_tokens"] == 290 + 50 + 190
    assert summary["tokens_per_s"] == pytest.approx(75.0), "over the wall time of the steps"
    assert (summary["step_s"], summary["training_s"]) == (4.0, 200.0)
    assert summary["num_held_out"] == 32
    assert summary["train_s"] == pytest.approx(100.0)


def test_engine_idle_share_is_the_mean_of_the_steps_that_measured_it() -> None:
    of_run = rows(3)
    steps = [row for row in of_run if "reward" in row]
    steps[1]["engine/idle_share"], steps[2]["engine/idle_share"] = 0.5, 0.75
    assert summarise(of_run, seed=0)["engine_idle_share"] == 0.625
    assert summarise(rows(3), seed=0)["engine_idle_share"] == 0.0


def shown(table: Table, width: int = 80) -> list[list[str]]:
    """Return the cells of the table, line by line, as a terminal shows them."""
    output = io.StringIO()
    Console(file=output, width=width).print(table)
    lines = [line for line in output.getvalue().splitlines() if re.search("[│┃]", line)]
    return [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines]


def test_summary_table_leads_with_rewards_time_and_rate() -> None:
    assert shown(summary_table(summarise(rows(50), seed=0), "GRPO"), width=120) == [
        ["held-out reward (n=32)", "0.500 → 0.750 (+0.250)"],
        ["sampled reward", "0.045 → 0.445 (+0.400)"],
        ["time", "3:20, 50 steps"],
        ["tokens/s", "75"],
        ["warm-up", "2 steps in 0:09, sampled reward 0.250"],
        ["trainer", "generate 0:25, suspend 0:15, update 0:05, resume 0:10, train 1:40"],
        ["engines", "530 of 3,920 prompt tokens computed, 49 suspends"],
        ["staleness", "25% of tokens, at most 1; 150 rollouts across updates"],
    ]


def test_seeds_table_has_a_line_per_run_and_their_mean() -> None:
    better = [row | {"eval/greedy_reward": 1.0} if "eval/num_prompts" in row else row
              for row in rows(30)]  # fmt: skip
    summaries = [summarise(rows(50), seed=3), summarise(better, seed=4)]
    assert shown(seeds_table(summaries, "GRPO"), width=100) == [
        ["", "held-out reward (n=32)", "sampled reward", "time", "tokens/s"],
        ["seed 3", "0.500 → 0.750 (+0.250)", "0.045 → 0.445 (+0.400)", "3:20, 50 steps", "75"],
        ["seed 4", "0.500 → 1.000 (+0.500)", "0.045 → 0.245 (+0.200)", "2:00, 30 steps", "75"],
        ["mean", "0.500 → 0.875 (+0.375)", "0.045 → 0.345 (+0.300)", "2:40, 40 steps", "75"],
    ]


def test_seeds_table_leaves_missing_figures_out_of_the_mean() -> None:
    summaries = [summarise(rows(num), seed=num) for num in (1, 5)]
    sampled = [cells[2] for cells in shown(seeds_table(summaries, "GRPO"), width=100)]
    assert sampled[1:] == ["0.000", "0.005 → 0.035 (+0.030)", "0.003 → 0.035 (+0.033)"]


def test_answers_table_shows_first_and_last_answers() -> None:
    output = io.StringIO()
    texts = ["[bold]", "middle", "right"]
    rows = [{"answers": [{"prompt": "What?", "answer": text}]} for text in texts]
    Console(file=output, width=80).print(answers_table(rows))
    shown = output.getvalue()
    assert "What?" in shown
    assert "[bold]" in shown, "it is text, not markup"
    assert "right" in shown
    assert "middle" not in shown


def test_summarise_leaves_steps_without_reward_out_or_nan() -> None:
    with_gaps = rows(12)
    with_gaps[2]["eval/greedy_reward"] = None  # type: ignore[assignment]
    with_gaps[4]["reward"] = None  # type: ignore[assignment]
    summary = summarise(with_gaps, seed=0)
    assert math.isnan(summary["greedy_gain"])
    assert summary["sampled_reward_first"] == pytest.approx(0.03), "of 5 of 11 steps"
    assert summary["num_steps"] == 12


def test_summarise_a_short_run_compares_steps_that_the_two_ends_do_not_share() -> None:
    summary = summarise(rows(5), seed=0)
    assert summary["sampled_reward_first"] == pytest.approx(0.005)
    assert summary["sampled_reward_last"] == pytest.approx(0.035)
    assert summary["sampled_gain"] == pytest.approx(0.03)
    assert summarise(rows(1), seed=0)["sampled_gain"] is None, "one step shows no gain"
    one_step = shown(summary_table(summarise(rows(1), seed=0), "GRPO"))
    assert ["sampled reward", "0.000"] in one_step
