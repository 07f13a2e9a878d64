"""The figures of a run: what each is computed from, and that the time left never rises."""

import io
import math

import pytest
from rich.console import Console

from trainer_hooks.metrics.figures import (
    RewardChange,
    held_out_reward,
    of_prompts,
    sampled_reward,
    step_seconds,
    time_left_s,
    tokens_per_s,
)
from trainer_hooks.metrics.stage_clock import StageClock
from trainer_hooks.train import Dashboard
from trainer_hooks.train.summary import summarise


def step(reward: float | None, seconds: float = 4.0, tokens: int = 100) -> dict[str, float | None]:
    return {"reward": reward, "timing_s/step": seconds, "completions/num_tokens": tokens}


def test_tokens_per_s_divides_all_tokens_by_the_wall_time_of_the_steps() -> None:
    assert tokens_per_s([step(0.0, 1.0, 300), step(0.0, 3.0, 100)]) == 100.0, "not 166, the mean"
    assert tokens_per_s([{"reward": 1.0}]) is None


def test_step_seconds_is_the_mean_of_the_last_ten_steps() -> None:
    assert step_seconds([step(0.0, 100.0), *[step(0.0, 2.0)] * 9, step(0.0, 4.0)]) == 2.2
    assert step_seconds([{"reward": 1.0}]) is None


def test_sampled_reward_compares_two_ends_that_share_no_step() -> None:
    rewards = [0.125, None, 0.125, 0.25, 0.125, 0.1875]
    assert sampled_reward([step(reward) for reward in rewards]) == RewardChange(0.125, 0.15625, 2)
    assert sampled_reward([step(float(i)) for i in range(30)]) == RewardChange(4.5, 24.5, 10)
    single = sampled_reward([step(0.5)])
    assert single is not None
    assert (str(single), single.gain) == ("0.500", None)
    assert sampled_reward([step(None)]) is None


def test_held_out_reward_keeps_an_evaluation_without_any_reward() -> None:
    before, after = (
        {"eval/greedy_reward": 0.5, "eval/num_prompts": 8.0},
        {"eval/greedy_reward": None},
    )
    change = held_out_reward([before, step(1.0), {**before, **after}])
    assert change is not None
    assert (change.before, change.num) == (0.5, 8)
    assert change.after is not None
    assert math.isnan(change.after)
    assert held_out_reward([step(1.0)]) is None
    assert (of_prompts(1024.0), of_prompts(None)) == (" (n=1,024)", "")


def test_time_left_never_rises_within_a_step() -> None:
    left = [time_left_s(10.0, 3, since_last_s) for since_last_s in (0.0, 4.0, 10.0, 99.0)]
    assert left == [30.0, 26.0, 20.0, 20.0]


def test_stage_clock_shows_no_more_time_left_while_a_step_takes_long() -> None:
    now = [0.0]
    clock = StageClock(clock=lambda: now[0])
    clock.start(5)
    assert clock.text() == "elapsed 0:00"
    now[0] = 60.0
    clock.reach(1)
    now[0] = 3_600.0
    assert clock.text() == "elapsed 1:00:00, left 3:00"
    clock.reach(2, step_s=120.0)
    assert clock.text() == "elapsed 1:00:00, left 6:00"
    clock.reach(5)
    assert clock.text() == "elapsed 1:00:00"


def test_stage_clock_counts_the_first_step_after_a_resume_as_one() -> None:
    now = [0.0]
    clock = StageClock(clock=lambda: now[0])
    clock.start(20)
    now[0] = 65.0
    clock.reach(11)
    clock.reach(11)
    assert clock.text() == "elapsed 1:05, left 9:45"


def test_summary_and_dashboard_show_the_same_figures() -> None:
    made_later = {
        "train/num_tokens": 100, "train/num_stale_tokens": 0, "policy_staleness/max": 0.0,
        "policy_staleness/num_mixed_rollouts": 0, "prompts/num_tokens": 8,
        "engine/num_prefill_tokens": 8, "timing_share/train": 1.0,
    }  # fmt: skip
    rows = [
        {"trainer/step": 0, "eval/greedy_reward": 0.25, "eval/num_prompts": 32.0},
        *(
            {**step(reward, seconds=2.0 + i), **made_later, "trainer/step": i + 1}
            for i, reward in enumerate([0.125, 0.125, 0.25, 0.125, 0.1875])
        ),
        {"trainer/step": 5, "eval/greedy_reward": 0.375, "eval/num_prompts": 32.0},
    ]
    summary = summarise(rows, seed=0)
    assert summary["sampled_gain"] == 0.03125
    assert (summary["tokens_per_s"], summary["step_s"]) == (25.0, 4.0)

    dashboard = Dashboard(Console(file=io.StringIO(), width=100))
    for row in rows:
        dashboard.show(row)
    output = io.StringIO()
    Console(file=output, width=100).print(dashboard.render(100))
    assert "time of a step: 4.00 s" in output.getvalue()
    assert "held out 0.375 (n=32)" in output.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_dashboard_of_a_resumed_run_takes_the_time_of_a_step_from_the_earlier_steps(
    is_terminal: bool,
) -> None:
    dashboard = Dashboard(Console(file=io.StringIO(), width=100, force_terminal=is_terminal))
    dashboard.recall([step(0.5, seconds=2.0)])
    dashboard.show({**step(0.5, seconds=4.0), "timing_share/train": 1.0})
    output = io.StringIO()
    Console(file=output, width=100).print(dashboard.render(100))
    dashboard.close()
    assert "time of a step: 3.00 s" in output.getvalue()
