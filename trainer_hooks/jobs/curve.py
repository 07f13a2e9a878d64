"""The reward curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollout.errors import ConfigError

SMOOTHING_STEPS = 5


def write_reward_curve(
    path: Path | str, rewards: Sequence[float], title: str, ylabel: str = "mean sampled reward"
) -> None:
    """Draw the reward of steps 1, 2, ... and its running mean to `path` (PNG, SVG, PDF by suffix).

    Raises ConfigError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "drawing a curve needs matplotlib: pip install 'rollout-engine[demo]'"
        ) from error
    steps = range(1, len(rewards) + 1)
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, linewidth=1.0, label="each step")
    axes.plot(steps, running_mean(rewards), color="tab:blue", label=f"mean of {SMOOTHING_STEPS}")
    axes.set(title=title, xlabel="training step", ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def running_mean(values: Sequence[float], window: int = SMOOTHING_STEPS) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means
