"""rollout_metrics and step_metrics, and the page docs/metrics.md that lists all metrics."""

import fnmatch
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from rollout.errors import ConfigError
from tests.trainer_hooks.fakes import finished_request
from tests.trainer_hooks.test_time_account import stats_of
from trainer_hooks import Rollout, RolloutBatch, collate_rollouts, overlong_penalties
from trainer_hooks.metrics import (
    EngineUse,
    TimeAccount,
    read_histogram,
    rollout_metrics,
    step_metrics,
)
from trainer_hooks.metrics.axes import AXIS_OF_METRIC
from trainer_hooks.metrics.histogram import NUM_BINS, histogram_columns
from trainer_hooks.producer.batches import batch_metrics
from trainer_hooks.producer.groups import ScoredGroup
from trainer_hooks.prompts.ledger import PromptItem, PromptTicket
from trainer_hooks.rollouts import as_rollout

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def rows_of_page() -> dict[str, list[str]]:
    """Return the cells of each row of the page's table by the name in its first cell."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {cells[0].strip("`"): [cell.strip(" `") for cell in cells] for cells in rows}


def is_on_page(metric: str) -> bool:
    """Return whether the page lists `metric`, by its own name or by a family with `*`."""
    return any(fnmatch.fnmatchcase(metric, name) for name in rows_of_page())


def two_groups() -> RolloutBatch:
    requests = [
        finished_request([1], [2, 3, 4], versions=[0, 1, 2], kv_versions=[0, 0, 1.6]),
        finished_request([1], [2], versions=[2]),
        finished_request([1], [2, 3], versions=[2, 2]),
        finished_request([1], [2, 3], versions=[0, 0]),
    ]
    return collate_rollouts(requests, [1.0, 0.5, 0.25, 0.25], train_version=2)


def test_rollout_metrics_of_lengths_truncation_and_flat_groups_by_hand() -> None:
    reasons = ["length", "stop", "stop", "stop"]
    metrics = rollout_metrics(two_groups(), 2, finish_reasons=reasons, entropy=1.25)
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["completions/clipped_ratio"] == 0.25
    assert metrics["completions/min_length"] == 1.0
    assert metrics["completions/mean_terminated_length"] == pytest.approx(5 / 3)
    assert metrics["completions/min_terminated_length"] == 1.0
    assert metrics["completions/max_terminated_length"] == 2.0
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.25, 1.0)
    assert metrics["entropy"] == 1.25


def batch_with_a_tool() -> RolloutBatch:
    """Return one rollout of 3 generated tokens and 50 tokens of tool output, and one failed
    rollout.
    """
    first = finished_request([1, 2], [10], versions=[0])
    second = finished_request([1, 2, 10, *[9] * 50], [11, 12], versions=[0, 0])
    failed = finished_request([1, 2], [10, 11], versions=[0, 0])
    return collate_rollouts([Rollout([first, second]), failed], [1.0, None], train_version=0)


def test_rollout_metrics_do_not_count_tool_output_as_generated() -> None:
    metrics = rollout_metrics(batch_with_a_tool(), 2, finish_reasons=["length", "stop"])
    assert metrics["completions/mean_length"] == metrics["completions/max_length"] == 3.0
    assert metrics["completions/num_tokens"] == 3 + 2
    assert metrics["prompts/num_tokens"] == 2 + 2


def test_overlong_penalties_do_not_count_tool_output() -> None:
    lengths_B = batch_with_a_tool().completion_lengths_B
    assert overlong_penalties(lengths_B, max_length=20, cache_length=10).tolist() == [0.0, 0.0]


def test_rollout_metrics_leave_failed_rollouts_out_of_group_statistics() -> None:
    batch = collate_rollouts(
        [finished_request([1], [2], versions=[0]) for _ in range(4)],
        [None, None, 0.5, math.nan],
        train_version=0,
    )
    metrics = rollout_metrics(batch, 2, finish_reasons=["length", "length", "stop", "length"])
    assert metrics["failed_fraction"] == 0.75
    assert metrics["frac_reward_zero_std"] == 1.0
    assert metrics["completions/clipped_ratio"] == 0.0


def test_rollout_metrics_of_a_batch_without_any_turn() -> None:
    rollouts = [Rollout([], failure="reset_error") for _ in range(2)]
    metrics = rollout_metrics(collate_rollouts(rollouts, [None, None], 3), 2)
    assert metrics["failed_fraction"] == 1.0
    assert metrics["policy_staleness/num_mixed_rollouts"] == 0


def test_frac_reward_zero_std_counts_rewards_equal_up_to_rounding() -> None:
    requests = [finished_request([1], [2], versions=[0]) for _ in range(7)]
    metrics = rollout_metrics(collate_rollouts(requests, [0.1] * 7, train_version=0), 7)
    assert metrics["frac_reward_zero_std"] == 1.0


def test_rollout_metrics_refuse_another_number_of_finish_reasons() -> None:
    with pytest.raises(ConfigError, match="1 finish reasons for 4 rollouts"):
        rollout_metrics(two_groups(), 2, finish_reasons=["stop"])


def test_read_histogram_returns_the_counts_of_all_tokens() -> None:
    metrics = rollout_metrics(two_groups(), 2)
    assert read_histogram(metrics, "policy_staleness") == {0: 4, 1: 1, 2: 3}
    assert read_histogram(metrics, "kv_lag") == {0: 7, 1: 1}
    assert sum(read_histogram(metrics, "kv_cache_staleness").values()) == 8
    assert metrics["kv_lag/max"] == 1.0


def test_histogram_columns_have_an_open_last_bin_and_none_without_values() -> None:
    columns = histogram_columns("lag", torch.tensor([0, 3, NUM_BINS, 500]))
    assert columns["lag/hist/16+"] == 2
    assert columns["lag/hist/1"] == 0
    assert sum(columns.values()) == 4
    assert read_histogram(columns, "lag")[NUM_BINS] == 2
    assert histogram_columns("lag", torch.tensor([])) == {}


def test_step_metrics_divide_tokens_by_the_wall_time_of_the_step() -> None:
    ticks = iter([0.0, 4.0])
    times = TimeAccount(clock=lambda: next(ticks)).take()
    metrics = step_metrics(times, num_generated_tokens=100, num_trained_tokens=40)
    assert metrics["completions/tokens_per_s"] == 25.0
    assert metrics["train/tokens_per_s"] == 10.0
    assert metrics["timing_share/other"] == 1.0


def test_step_metrics_divide_generated_tokens_by_the_wall_time_if_generation_was_instant() -> None:
    ticks = iter([0.0, 1.0, 1.001, 4.0])
    account = TimeAccount(clock=lambda: next(ticks))
    with account.spend("generate"):
        pass
    metrics = step_metrics(account.take(), num_generated_tokens=100, num_trained_tokens=40)
    assert metrics["timing_s/generate"] == pytest.approx(0.001)
    assert metrics["completions/tokens_per_s"] == 25.0, "the batch was sampled while training"
    assert metrics["train/tokens_per_s"] == 10.0


def test_metrics_page_lists_every_metric_of_a_step() -> None:
    use = EngineUse()
    use.take(stats_of(0.0, 0))
    rollout = as_rollout(finished_request([1], [2], versions=[0]))
    group = ScoredGroup(
        ticket=PromptTicket(epoch=0, position=0, index=0),
        item=PromptItem("a"),
        rollouts=[rollout],
        rewards=[1.0],
        generate_s=1.0,
        reward_s=1.0,
    )
    metrics = {
        **rollout_metrics(two_groups(), 2, finish_reasons=["stop"] * 4, entropy=1.0),
        **step_metrics(TimeAccount().take(), num_generated_tokens=1, num_trained_tokens=1),
        **use.take(stats_of(0.0, 0)),
        **stats_of(0.0, 0).as_metrics(),
        **batch_metrics(
            [group],
            collate_rollouts([rollout], [1.0], 0),
            Counter(),
            waited_s=0.0,
            num_waiting_batches=0,
        ),
    }
    assert [name for name in metrics if not is_on_page(name)] == []
    assert not is_on_page("unknown/metric")


def test_metrics_page_gives_the_axis_over_which_wandb_draws_each_metric() -> None:
    axes = {name: cells[5] for name, cells in rows_of_page().items()}
    for name, axis in axes.items():
        fitting = [own for glob, own in AXIS_OF_METRIC.items() if fnmatch.fnmatchcase(name, glob)]
        assert axis == fitting[-1], name  # a later glob overrides an earlier one, as in wandb
    assert {axes["reward"], axes["kv_lag/mean"]} == {"trainer/step", "rollout/version"}
