"""The reward curve of a run, and the run itself, as pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError
from trainer_hooks.metrics.axes import TRAINER_STEP
from trainer_hooks.metrics.histogram import read_histogram

SMOOTHING_STEPS = 5


def write_reward_curve(
    path: Path | str, rewards: Sequence[float], title: str, ylabel: str = "mean sampled reward"
) -> None:
    """Draw the reward of steps 1, 2, ... and its running mean to `path` (PNG, SVG, PDF by suffix).

    Raises ConfigError if matplotlib is not installed.
    """
    figure = _figure(width=7.0)
    axes = figure.add_subplot()
    _draw_rewards(axes, list(range(1, len(rewards) + 1)), rewards)
    axes.set(title=title, ylabel=ylabel)
    _legend_below(axes)
    figure.savefig(path, dpi=150)


def write_run_picture(path: Path | str, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw a run from its metrics: reward with held-out points, tokens by lag, seconds by part.

    `rows`: of metrics.jsonl. Raises ConfigError if matplotlib is not installed.
    """
    figure = _figure(width=15.0)
    figure.suptitle(title)
    steps = [row for row in rows if row.get("reward") is not None]
    numbers = [row[TRAINER_STEP] for row in steps]
    reward, lag, parts = figure.subplots(1, 3)
    _draw_rewards(reward, numbers, [row["reward"] for row in steps])
    held_out = [row for row in rows if row.get("eval/greedy_reward") is not None]
    reward.plot(
        [row[TRAINER_STEP] for row in held_out],
        [row["eval/greedy_reward"] for row in held_out],
        "o",
        color="tab:red",
        label="held out, greedy",
    )
    reward.set(title="reward", ylabel="mean reward")
    _legend_below(reward)
    ages: Counter[int] = Counter()
    for row in steps:
        ages.update(read_histogram(row, "policy_staleness"))
    lag.bar([str(age) for age in sorted(ages)], [ages[age] for age in sorted(ages)])
    lag.set(title="tokens trained on, by lag", xlabel="versions behind", ylabel="tokens")
    _draw_seconds(parts, numbers, steps)
    figure.savefig(path, dpi=150)


def _figure(width: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing a curve needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, 4.0), layout="constrained")


def _draw_rewards(axes: Any, steps: Sequence[int], rewards: Sequence[float]) -> None:
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, linewidth=1.0, label="each step")
    axes.plot(steps, running_mean(rewards), color="tab:blue", label=f"mean of {SMOOTHING_STEPS}")
    axes.set(xlabel="training step")
    axes.grid(alpha=0.3)


def _draw_seconds(axes: Any, numbers: Sequence[int], steps: Sequence[Mapping[str, Any]]) -> None:
    """Seconds of each step by part of the time account, one upon the other; the largest first."""
    prefix = "timing_share/"
    names = dict.fromkeys(
        name.removeprefix(prefix) for row in steps for name in row if name.startswith(prefix)
    )
    seconds = {name: [row.get(f"timing_s/{name}") or 0.0 for row in steps] for name in names}
    total = sum(map(sum, seconds.values()))
    shown = [name for name in names if sum(seconds[name]) >= 0.01 * total]
    shown.sort(key=lambda name: -sum(seconds[name]))
    if shown:
        axes.stackplot(numbers, *(seconds[name] for name in shown), labels=shown, step="mid")
    axes.set(title="seconds of a step, by part", xlabel="training step", ylabel="seconds")
    if shown:
        _legend_below(axes)


def _legend_below(axes: Any) -> None:
    """Beside the curves, which a legend between them would hide."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, frameon=False)


def running_mean(values: Sequence[float], window: int = SMOOTHING_STEPS) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means
