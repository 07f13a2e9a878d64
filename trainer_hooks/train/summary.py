"""The summary of a finished run, computed from its metrics.jsonl alone, and its tables.

Used by `trainer_hooks.train.main` at the end of each run; `trainer_hooks.train.report` uses
WINDOW_STEPS. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

WINDOW_STEPS = 10  # at both ends of a run, over which its reward is a mean
TIMES = ("generate", "suspend", "update", "resume", "train", "wait")


def summarise(rows: Sequence[Mapping[str, Any]], seed: int) -> dict[str, float]:
    """Return the figures of a finished run by name, from all its metric rows.

    Rewards are means, NaN if no rollout has one. `first` and `last` cover the first and last
    WINDOW_STEPS steps.
    `prompt_tokens` counts the prompt tokens of all rollouts after the first step.
    `prefilled_tokens` counts those that engines computed, fewer because the samples of a group
    share their prompt. Suspends, and the memory that they released, are counted after the first
    step.
    Seconds are the trainer's. In `wait_s` it waits for engines that run beside it, whose idle time
    is `engine_idle_share`.
    """
    warmup = [row for row in rows if "warmup/step" in row]
    steps = [row for row in rows if "reward" in row]
    greedy = [row["eval/greedy_reward"] for row in rows if "eval/greedy_reward" in row]
    greedy = [math.nan if reward is None else reward for reward in greedy]

    def total(name: str) -> float:
        return math.fsum(row[name] for row in steps)

    def seconds(name: str) -> float:  # not every way to run spends time on each
        return math.fsum(row.get(f"timing_s/{name}", 0.0) for row in steps)

    first = mean_reward(steps[:WINDOW_STEPS])
    last = mean_reward(steps[-WINDOW_STEPS:])
    generate_s = seconds("generate") or seconds("step")
    warmed_up, evaluated = {}, {}
    if warmup:
        warmed_up = {
            "warmup_steps": warmup[-1]["warmup/step"],
            "warmup_sampled_reward": warmup[-1]["warmup/reward"],
            "warmup_s": warmup[-1]["timing_s/warmup"],
        }
    if greedy:
        evaluated = {
            "greedy_reward_before": greedy[0],
            "greedy_reward_after": greedy[-1],
            "greedy_gain": greedy[-1] - greedy[0],
        }
    return {
        "seed": seed,
        **warmed_up,
        "num_steps": len(steps),
        "sampled_reward_first": first,
        "sampled_reward_last": last,
        "sampled_gain": last - first,
        **evaluated,
        "rollouts_across_updates": total("policy_staleness/num_mixed_rollouts"),
        "num_suspends": growth([row.get("engine/num_suspends", 0) for row in steps]),
        "suspends_released_mib": growth([row.get("engine/suspended_bytes", 0) for row in steps])
        / 2**20,
        "stale_token_fraction": total("train/num_stale_tokens") / max(total("train/num_tokens"), 1),
        "max_staleness": max(row["policy_staleness/max"] for row in steps),
        "prompt_tokens": sum(row["prompts/num_tokens"] for row in steps[1:]),
        "prefilled_tokens": growth([row["engine/num_prefill_tokens"] for row in steps]),
        "tokens_per_s": total("completions/num_tokens") / generate_s,
        **{f"{name}_s": seconds(name) for name in TIMES},
        "engine_idle_share": fmean(row.get("engine/idle_share", 0.0) for row in steps),
    }


def mean_reward(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean reward of the steps that have one; NaN if none has."""
    rewards = [row["reward"] for row in steps if row["reward"] is not None]
    return fmean(rewards) if rewards else math.nan


def growth(counts: Sequence[int]) -> int:
    """Return the growth of a counter from the first row. A resumed run counts from 0 again."""
    return sum(b - a if b >= a else b for a, b in pairwise(counts))


def summary_table(summaries: Sequence[Mapping[str, float]], title: str) -> Table:
    """Return a table with one column per run and one row per figure."""
    table = Table(title=title)
    table.add_column("")
    for summary in summaries:
        table.add_column(f"seed {summary['seed']}", justify="right")
    for name in summaries[0]:
        if name != "seed":
            values = (f"{summary[name]:,.3f}".removesuffix(".000") for summary in summaries)
            table.add_row(name, *values)
    return table


def answers_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of held-out problems with the greedy answers of the first and last row."""
    table = Table(title="greedy answers to held-out problems", show_lines=True)
    for column in ("problem", "before", "after"):
        table.add_column(column)
    for before, after in zip(rows[0]["answers"], rows[-1]["answers"], strict=True):
        cells = (before["prompt"].strip(), before["answer"].strip(), after["answer"].strip())
        table.add_row(*(Text(cell) for cell in cells))
    return table
