"""The summary of a finished run, computed from its metrics.jsonl alone, and its tables.

Used by `trainer_hooks.train.main` at the end of each run. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

from trainer_hooks.metrics import WARNINGS, run_warnings
from trainer_hooks.metrics.figures import (
    held_out_reward,
    sampled_reward,
    step_seconds,
    tokens_per_s,
    total_seconds,
    training_steps,
)

TIMES = ("generate", "suspend", "update", "resume", "train", "wait")


def summarise(rows: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Any]:
    """Return the figures of a finished run by name, from all its metric rows.

    Figures that more than one place shows are those of `trainer_hooks.metrics.figures`: rewards and
    gains (`sampled_reward`, `held_out_reward`), `tokens_per_s` over all steps, `step_s`
    (`step_seconds`) and `training_s`, the wall time of all steps. A mean reward is NaN if no
    held-out prompt has one. The last reward and the gain are None after a single measurement.
    `prompt_tokens` counts the prompt tokens of all rollouts after the first step.
    `prefilled_tokens` counts those that engines computed, fewer because the samples of a group
    share their prompt. Suspends, and the memory that they released, are counted after the first
    step.
    Seconds are the trainer's. In `wait_s` it waits for engines that run beside it, whose idle time
    is `engine_idle_share`. `warnings` has a sentence for each kind of warning of the steps.
    """
    warmup = [row for row in rows if "warmup/step" in row]
    steps = training_steps(rows)

    def total(name: str) -> float:
        return math.fsum(row[name] for row in steps)

    def seconds(name: str) -> float:  # not every way to run spends time on each
        return math.fsum(row.get(f"timing_s/{name}", 0.0) for row in steps)

    warmed_up, sampled, held_out = {}, sampled_reward(steps), held_out_reward(rows)
    if warmup:
        warmed_up = {
            "warmup_steps": warmup[-1]["warmup/step"],
            "warmup_sampled_reward": warmup[-1]["warmup/reward"],
            "warmup_s": warmup[-1]["timing_s/warmup"],
        }
    rewards: dict[str, float | None] = {}
    if sampled is not None:
        rewards = {
            "sampled_reward_first": sampled.before,
            "sampled_reward_last": sampled.after,
            "sampled_gain": sampled.gain,
        }
    if held_out is not None:
        rewards |= {
            "greedy_reward_before": held_out.before,
            "greedy_reward_after": held_out.after,
            "greedy_gain": held_out.gain,
            "num_held_out": held_out.num,
        }
    return {
        "seed": seed,
        **warmed_up,
        "num_steps": len(steps),
        **rewards,
        "rollouts_across_updates": total("policy_staleness/num_mixed_rollouts"),
        "num_suspends": growth([row.get("engine/num_suspends", 0) for row in steps]),
        "suspends_released_mib": growth([row.get("engine/suspended_bytes", 0) for row in steps])
        / 2**20,
        "stale_token_fraction": total("train/num_stale_tokens") / max(total("train/num_tokens"), 1),
        "max_staleness": max(row["policy_staleness/max"] for row in steps),
        "prompt_tokens": sum(row["prompts/num_tokens"] for row in steps[1:]),
        "prefilled_tokens": growth([row["engine/num_prefill_tokens"] for row in steps]),
        "tokens_per_s": tokens_per_s(steps),
        "step_s": step_seconds(steps),
        "training_s": total_seconds(steps),
        **{f"{name}_s": seconds(name) for name in TIMES},
        "engine_idle_share": fmean(row.get("engine/idle_share", 0.0) for row in steps),
        WARNINGS: run_warnings(rows),
    }


def growth(counts: Sequence[int]) -> int:
    """Return the growth of a counter from the first row. A resumed run counts from 0 again."""
    return sum(b - a if b >= a else b for a, b in pairwise(counts))


def summary_table(summaries: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return a table with one column per run and one row per figure."""
    table = Table(title=title)
    table.add_column("")
    for summary in summaries:
        table.add_column(f"seed {summary['seed']}", justify="right")
    for name in dict.fromkeys(name for summary in summaries for name in summary):
        if name not in ("seed", WARNINGS):
            table.add_row(name, *(_cell(summary.get(name)) for summary in summaries))
    return table


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}".removesuffix(".000")


def answers_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of held-out problems with the greedy answers of the first and last row."""
    table = Table(title="greedy answers to held-out problems", show_lines=True)
    for column in ("problem", "before", "after"):
        table.add_column(column)
    for before, after in zip(rows[0]["answers"], rows[-1]["answers"], strict=True):
        cells = (before["prompt"].strip(), before["answer"].strip(), after["answer"].strip())
        table.add_row(*(Text(cell) for cell in cells))
    return table
