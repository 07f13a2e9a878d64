"""Summaries of runs whose rows are made by hand."""

import io
import math

import pytest
from rich.console import Console

from trainer_hooks.train.summary import answers_table, summarise, summary_table


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


def test_summary_table_has_a_column_per_seed() -> None:
    output = io.StringIO()
    table = summary_table([summarise(rows(50), seed) for seed in (0, 1)], "GRPO")
    Console(file=output, width=120).print(table)
    assert "seed 0" in output.getvalue()
    assert "seed 1" in output.getvalue()
    assert "sampled_gain" in output.getvalue()


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
    Console(file=io.StringIO()).print(summary_table([summary, summarise(rows(1), seed=1)], "GRPO"))
