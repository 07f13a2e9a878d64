"""The texts that a run prints: an outline at its start, and a summary with tables at its end.

Used by `trainer_hooks.train.main`. `summarise` computes the summary from the rows of metrics.jsonl.
It only reads files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, TypeGuard

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollout.set_aside import paths_set_aside
from trainer_hooks.checkpoint import find_checkpoint, read_trainer_state
from trainer_hooks.metrics import WARNINGS, run_warnings
from trainer_hooks.metrics.figures import (
    RewardChange,
    held_out_reward,
    of_prompts,
    sampled_reward,
    step_seconds,
    tokens_per_s,
    total_seconds,
    training_steps,
)
from trainer_hooks.metrics.stage_clock import minutes
from trainer_hooks.train.hydra_job import given_overrides
from trainer_hooks.train.job import JobSettings
from trainer_hooks.train.run_files import CONFIG_NAME
from trainer_hooks.train.task import Task

Summary = Mapping[str, Any]  # the result of `summarise`
_ANSWER_CHARACTERS = 160  # most characters of a text in the table of answers
TIMES = ("generate", "suspend", "update", "resume", "train", "wait")


def outline(
    settings: JobSettings, task: Task, num_prompts: int, directory: Path, resume_step: int | None
) -> dict[str, str]:
    """Return the outline of a run: what it is about to do, by name.

    `num_prompts` counts the training prompts, and `directory` is the run's. `resume_step` is the
    step of the checkpoint from which it continues, or None.
    """
    model, algorithm, trainer = settings.model, settings.algorithm, settings.trainer
    parts = [
        model.path or "random weights",
        f"{short_count(task.num_parameters())} parameters",
        f"LoRA of rank {model.lora.rank}" if model.lora else "",
        "trained in float32",
        "" if settings.engine.dtype == "auto" else f"served in {settings.engine.dtype}",
    ]
    steps = (
        f"{trainer.num_steps:,} of {algorithm.groups_per_step} groups x {algorithm.group_size} "
        f"samples, each of up to {algorithm.max_new_tokens:,} tokens"
    )
    lines = {
        "overrides": " ".join(given_overrides()),
        "model": ", ".join(filter(None, parts)),
        "prompts": f"{num_prompts:,} to train on, {len(task.held_out):,} held out",
        "steps": steps + ("" if resume_step is None else f"; {resume_step:,} are done"),
        "files": f"{shown_path(directory)} ({CONFIG_NAME} has all settings)",
        "earlier": ", ".join(str(shown_path(path)) for path in paths_set_aside(directory)),
    }
    return {name: text for name, text in lines.items() if text}


def print_outline(lines: Mapping[str, str], console: Console) -> None:
    """Print the lines of `outline` in two columns. Long lines are folded only on a terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines.items():
        row = Text(f"{name:<9}", style="bold"), Text(text)
        if console.is_terminal:
            table.add_row(*row)
        else:
            console.print(*row, sep="  ", soft_wrap=True)
    if console.is_terminal:
        console.print(table)


def shown_path(path: Path) -> Path:
    """Return `path` relative to the working directory, or unchanged if it is elsewhere."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def short_count(number: int) -> str:
    """Return a count with three digits, such as 135M or 1.54B."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def interrupted_text(directory: Path) -> str:
    """Return what an interrupted run has left in `directory`, and how to continue it."""
    checkpoint = find_checkpoint(directory / "checkpoints")
    if checkpoint is None:
        return "interrupted before the first checkpoint; the same command starts over"
    return (
        f"interrupted; the checkpoint of step {read_trainer_state(checkpoint).step} is kept\n"
        "continue: the same command with resume=auto\n"
        f"policy: {shown_path(checkpoint)}"
    )


def summarise(rows: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Any]:
    """Return the results of a finished run by name, computed from all rows of its metrics.

    `trainer_hooks.metrics.figures` defines rewards, gains, `tokens_per_s`, `step_s` and
    `training_s`. A mean reward is NaN if no held-out prompt has a reward. The last reward and the
    gain are None after a single measurement. `prompt_tokens`, `prefilled_tokens` and suspends do
    not count the first step. `prefilled_tokens` counts only prompt tokens that engines computed,
    because samples of a group share their prompt. Seconds are the trainer's. `warnings` has a
    sentence for each kind of warning.
    """
    warmup = [row for row in rows if "warmup/step" in row]
    steps = training_steps(rows)

    def total(name: str) -> float:
        return math.fsum(row[name] for row in steps)

    def seconds(name: str) -> float:  # not every mode spends time on every category
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
    # The first step has no idle share, which needs two measurements.
    idle_shares = [row["engine/idle_share"] for row in steps if "engine/idle_share" in row]
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
        "engine_idle_share": fmean(idle_shares) if idle_shares else 0.0,
        WARNINGS: run_warnings(rows),
    }


def growth(counts: Sequence[int]) -> int:
    """Return the growth of a counter from the first row on. A resumed run counts from 0 again."""
    return sum(b - a if b >= a else b for a, b in pairwise(counts))


def summary_table(summary: Summary, title: str) -> Table:
    """Return a table of one run. Rewards, time and rate come first."""
    table = Table(title=title, show_header=False)
    for name, value in lead_figures(summary).items():
        table.add_row(Text(name, style="bold"), Text(value, style="bold"))
    table.add_section()
    for name, value in other_figures(summary).items():
        table.add_row(name, value)
    return table


def seeds_table(summaries: Sequence[Summary], title: str) -> Table:
    """Return a table of rewards, time and rate with a line per run, and the mean of the runs below.
    Missing numbers do not count in the mean."""
    names = {name for summary in summaries for name, value in summary.items() if _is_figure(value)}
    values = {name: [own for s in summaries if _is_figure(own := s.get(name))] for name in names}
    mean = {name: fmean(own) for name, own in values.items()}
    lines = {f"seed {summary['seed']}": lead_figures(summary) for summary in summaries}
    table, figures = Table(title=title), lead_figures(mean)
    for name in ["", *figures]:
        table.add_column(name, justify="right" if name else "left")
    for label, own in lines.items():
        table.add_row(label, *(own.get(name, "-") for name in figures))
    table.add_section()
    table.add_row("mean", *figures.values(), style="bold")
    return table


def _is_figure(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def lead_figures(summary: Summary) -> dict[str, str]:
    """Return the most important results of a run by name: rewards before and after, time, and
    rate."""
    num = summary.get("num_held_out")
    held_out = _change(summary, "greedy_reward_before", "greedy_reward_after")
    sampled = _change(summary, "sampled_reward_first", "sampled_reward_last")
    rate = summary.get("tokens_per_s")
    figures = {
        f"held-out reward{of_prompts(num)}": held_out,
        "sampled reward": sampled,
        "time": f"{minutes(summary['training_s'])}, {summary['num_steps']:,.0f} steps",
        "tokens/s": None if rate is None else f"{rate:,.0f}",
    }
    return {name: value for name, value in figures.items() if value is not None}


def _change(summary: Summary, before: str, after: str) -> str | None:
    """Return two rewards and the gain as text, or None if the summary has no such rewards."""
    if summary.get(before) is None:
        return None
    change = RewardChange(summary[before], summary.get(after), None)
    if change.gain is None:
        return str(change)
    return f"{change} ({round(change.gain, 3) + 0.0:+.3f})"  # the sum makes -0.0 positive


def other_figures(summary: Summary) -> dict[str, str]:
    """Return the remaining results of a run by name, several to a line. Seconds below 1% of the
    run's time are omitted."""
    times = {name: summary[f"{name}_s"] for name in TIMES}
    least_s = summary["training_s"] / 100
    shown = [f"{name} {minutes(seconds)}" for name, seconds in times.items() if seconds > least_s]
    engine = [
        f"{summary['prefilled_tokens']:,} of {summary['prompt_tokens']:,} prompt tokens computed",
        f"{summary['num_suspends']:,} suspends" if summary["num_suspends"] else "",
        f"idle {summary['engine_idle_share']:.0%}" if summary["engine_idle_share"] else "",
    ]
    staleness = (
        f"{summary['stale_token_fraction']:.0%} of tokens, at most {summary['max_staleness']:.0f}; "
        f"{summary['rollouts_across_updates']:,.0f} rollouts across updates"
    )
    warmup = ""
    if "warmup_steps" in summary:
        warmup = (
            f"{summary['warmup_steps']:,} steps in {minutes(summary['warmup_s'])}, sampled reward "
            f"{summary['warmup_sampled_reward']:.3f}"
        )
    figures = {
        "warm-up": warmup,
        "trainer": ", ".join(shown),
        "engines": ", ".join(filter(None, engine)),
        "staleness": staleness if summary["max_staleness"] else "",
    }
    return {name: value for name, value in figures.items() if value}


def answers_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of held-out prompts with the greedy answers of the first and last row. Long
    texts are cut to their end, which has the question or the answer."""
    table = Table(title="greedy answers to held-out problems", show_lines=True)
    for column in ("problem", "before", "after"):
        table.add_column(column)
    for before, after in zip(rows[0]["answers"], rows[-1]["answers"], strict=True):
        cells = (before["prompt"], before["answer"], after["answer"])
        table.add_row(*(Text(_end_of(cell)) for cell in cells))
    return table


def _end_of(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _ANSWER_CHARACTERS else f"... {text[-_ANSWER_CHARACTERS:]}"
