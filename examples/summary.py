"""What a run showed, read from its metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich.table import Table

WINDOW_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Rewards are means in [0, 1]; `first` and `last` over the first and last 10 steps.

    `prompt_tokens` are those of all rollouts after the first step, `prefilled_tokens` how many were
    computed for them: the samples of a group share their prompt. Seconds are the trainer's; where
    engines work beside it, it waits for them for `wait_s`, and they are idle for a share of theirs.
    """

    seed: int
    warmup_steps: int
    warmup_sampled_reward: float
    num_steps: int
    sampled_reward_first: float
    sampled_reward_last: float
    greedy_reward_before: float
    greedy_reward_after: float
    stale_token_fraction: float
    max_staleness: float
    prompt_tokens: int
    prefilled_tokens: int
    tokens_per_s: float
    warmup_s: float
    generate_s: float
    suspend_s: float
    update_s: float
    resume_s: float
    train_s: float
    wait_s: float
    engine_idle_share: float

    @property
    def sampled_gain(self) -> float:
        """By how much GRPO raised the mean sampled reward."""
        return self.sampled_reward_last - self.sampled_reward_first

    @property
    def greedy_gain(self) -> float:
        """By how much GRPO raised the greedy reward on held-out problems."""
        return self.greedy_reward_after - self.greedy_reward_before


def summarise(rows: Sequence[Mapping[str, Any]], seed: int) -> RunSummary:
    """The summary of a finished run from all its metric rows."""
    warmup = [row for row in rows if "warmup/step" in row]
    steps = [row for row in rows if "reward" in row]
    greedy = [row["eval/greedy_reward"] for row in rows if "eval/greedy_reward" in row]

    def total(name: str) -> float:
        return sum(row[name] for row in steps)

    rewards = [row["reward"] for row in steps]
    return RunSummary(
        seed=seed,
        warmup_steps=warmup[-1]["warmup/step"],
        warmup_sampled_reward=warmup[-1]["warmup/reward"],
        num_steps=len(steps),
        sampled_reward_first=fmean(rewards[:WINDOW_STEPS]),
        sampled_reward_last=fmean(rewards[-WINDOW_STEPS:]),
        greedy_reward_before=greedy[0],
        greedy_reward_after=greedy[-1],
        stale_token_fraction=total("train/num_stale_tokens") / max(total("train/num_tokens"), 1),
        max_staleness=max(row["policy_staleness/max"] for row in steps),
        prompt_tokens=sum(row["prompts/num_tokens"] for row in steps[1:]),
        prefilled_tokens=_growth([row["engine/num_prefill_tokens"] for row in steps]),
        tokens_per_s=total("completions/num_tokens")
        / (total("timing_s/generate") or total("timing_s/step")),
        warmup_s=warmup[-1]["timing_s/warmup"],
        generate_s=total("timing_s/generate"),
        suspend_s=total("timing_s/suspend"),
        update_s=total("timing_s/update"),
        resume_s=total("timing_s/resume"),
        train_s=total("timing_s/train"),
        wait_s=sum(row.get("timing_s/wait", 0.0) for row in steps),
        engine_idle_share=fmean([row.get("engine/idle_share", 0.0) for row in steps]),
    )


def _growth(counts: Sequence[int]) -> int:
    """How far a counter ran over the rows; a resumed run starts from 0 again."""
    return sum(b - a if b >= a else b for a, b in pairwise(counts))


def summary_table(summaries: Sequence[RunSummary], algorithm: str = "GRPO") -> Table:
    """One column per run, one row per figure."""
    table = Table(
        title=f"{algorithm} on palindrome_generation",
        caption="rewards by reasoning-gym's own verifier;\nno comparison with more supervision",
    )
    table.add_column("")
    for summary in summaries:
        table.add_column(f"seed {summary.seed}", justify="right")
    names = [field.name for field in fields(RunSummary) if field.name != "seed"]
    for name in [*names, "sampled_gain", "greedy_gain"]:
        values = [getattr(summary, name) for summary in summaries]
        table.add_row(name, *(f"{value:,.3f}".removesuffix(".000") for value in values))
    return table
