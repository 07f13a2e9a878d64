"""The figures of a run, each defined once: rates, times and rewards, computed from metric rows.

Used by `console`, `measure`, `stage_clock` and `step_warnings` of `trainer_hooks.metrics`, by the
summary, dashboard, plots and report of `trainer_hooks.train`, and by examples/train_trl.py. No
function has side effects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Row = Mapping[str, Any]

WINDOW_STEPS = 10  # steps over which the time of a step and the reward at each end are means
STEP_S = "timing_s/step"
NUM_TOKENS = "completions/num_tokens"
HELD_OUT_REWARD = "eval/greedy_reward"
NUM_HELD_OUT = "eval/num_prompts"


def training_steps(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of training steps, without rows of a warm-up, an evaluation or an engine."""
    return [row for row in rows if "reward" in row]


def rate(num_tokens: float, seconds: float) -> float:
    """Return tokens per second. A time below a nanosecond counts as a nanosecond."""
    return num_tokens / max(seconds, 1e-9)


def tokens_per_s(steps: Sequence[Row]) -> float | None:
    """Return the sampled tokens per second of the steps' wall time.

    Steps without a token count or a time are left out. Returns None if no step is left.
    """
    timed = [step for step in steps if NUM_TOKENS in step and STEP_S in step]
    if not timed:
        return None
    return rate(sum(step[NUM_TOKENS] for step in timed), total_seconds(timed))


def total_seconds(steps: Sequence[Row]) -> float:
    """Return the sum of the steps' wall times."""
    return math.fsum(step.get(STEP_S) or 0.0 for step in steps)


def step_seconds(steps: Sequence[Row]) -> float | None:
    """Return the mean wall time of the last WINDOW_STEPS steps, or None if no step has a time."""
    times = [step[STEP_S] for step in steps if step.get(STEP_S) is not None]
    return fmean(times[-WINDOW_STEPS:]) if times else None


def time_left_s(step_s: float, num_left: int, since_last_s: float) -> float:
    """Return the estimated seconds until the last step is done.

    `step_s`: seconds per step.
    `num_left`: number of steps that are not done.
    `since_last_s`: seconds since the latest step was done.
    While a step runs, the estimate falls with the clock until the step has taken `step_s`, and then
    stands still.
    """
    return step_s * num_left - min(since_last_s, step_s)


@dataclass(frozen=True, slots=True)
class RewardChange:
    """A mean reward at the start and at the end of a run, NaN if no sample has a reward.

    `after`: None if there is a single measurement.
    `num`: number of held-out prompts of an evaluation, or number of training steps in each of the
    two means. None if the rows do not say it.
    """

    before: float
    after: float | None
    num: int | None

    @property
    def gain(self) -> float | None:
        """`after` minus `before`, or None if there is a single measurement."""
        return None if self.after is None else self.after - self.before

    def __str__(self) -> str:
        """Return text such as "0.125 → 0.156", or "0.125" for a single measurement."""
        values = [self.before] if self.after is None else [self.before, self.after]
        return " → ".join(f"{value:.3f}" for value in values)


def sampled_reward(steps: Sequence[Row]) -> RewardChange | None:
    """Return the change of the training rewards, or None if no step has a reward.

    Each end is the mean over up to WINDOW_STEPS steps that have a reward. The ends share no step.
    """
    rewards = [step["reward"] for step in steps if step.get("reward") is not None]
    rewards = [reward for reward in rewards if math.isfinite(reward)]
    if not rewards:
        return None
    num = max(min(WINDOW_STEPS, len(rewards) // 2), 1)
    after = fmean(rewards[-num:]) if len(rewards) > 1 else None
    return RewardChange(fmean(rewards[:num]), after, num)


def held_out_reward(rows: Sequence[Row]) -> RewardChange | None:
    """Return the change of the held-out greedy reward over all evaluations, or None without one."""
    evaluations = [row for row in rows if HELD_OUT_REWARD in row]
    if not evaluations:
        return None
    rewards = [row[HELD_OUT_REWARD] for row in evaluations]
    first, *rest = (math.nan if reward is None else reward for reward in rewards)
    num = evaluations[-1].get(NUM_HELD_OUT)
    return RewardChange(first, rest[-1] if rest else None, None if num is None else int(num))


def of_prompts(num: float | None) -> str:
    """Return text such as " (n=32)" for a number of held-out prompts, or "" for None."""
    return "" if num is None else f" (n={num:,.0f})"
