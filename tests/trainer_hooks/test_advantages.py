"""Advantages of groups, by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from rollout.errors import ConfigError
from trainer_hooks import group_advantages, has_reward_spread

NAN = math.nan


def test_std_divides_by_the_sample_deviation_of_the_group() -> None:
    # mean 0.25; deviations 0.75, -0.25 x 3; variance (0.5625 + 3 * 0.0625) / 3 = 0.25
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert_close(advantages, torch.tensor([[1.5, -0.5, -0.5, -0.5]]), rtol=1e-5, atol=0.0)


def test_none_only_subtracts_the_mean() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), normalize="none")
    assert_close(advantages, torch.tensor([[0.75, -0.25, -0.25, -0.25]]))


def test_a_failed_rollout_neither_gets_an_advantage_nor_moves_its_group() -> None:
    with_failure = group_advantages(torch.tensor([[1.0, NAN, 0.0, NAN]]))
    alone = group_advantages(torch.tensor([[1.0, 0.0]]))
    assert_close(with_failure, torch.tensor([[alone[0, 0], 0.0, alone[0, 1], 0.0]]))


@pytest.mark.parametrize("normalize", ["std", "none"])
@pytest.mark.parametrize("row", [[0.1] * 7, [0.3, NAN, 0.3, NAN], [5.0, NAN], [NAN, NAN]])
def test_a_group_without_spread_gives_exactly_zero(row: list[float], normalize: str) -> None:
    advantages = group_advantages(torch.tensor([row]), normalize)  # type: ignore[arg-type]
    assert torch.equal(advantages, torch.zeros(1, len(row)))


def test_integer_rewards_are_taken() -> None:
    assert_close(group_advantages(torch.tensor([[0, 2]]), "none"), torch.tensor([[-1.0, 1.0]]))


@given(st.lists(st.lists(st.floats(-100, 100), min_size=4, max_size=4), min_size=1, max_size=5))
def test_advantages_of_a_group_add_up_to_zero(rewards: list[list[float]]) -> None:
    advantages = group_advantages(torch.tensor(rewards))
    assert_close(advantages.sum(dim=1), torch.zeros(len(rewards)), rtol=0.0, atol=1e-3)


@given(st.lists(st.integers(0, 10), min_size=2, max_size=8), st.integers(1, 9), st.integers(-9, 9))
def test_std_advantages_do_not_depend_on_the_scale_of_rewards(
    rewards: list[int], scale: int, shift: int
) -> None:
    row = torch.tensor([rewards], dtype=torch.float32)
    assert_close(group_advantages(row * scale + shift), group_advantages(row), rtol=1e-3, atol=1e-4)


def test_spread_is_judged_without_the_failed_rollouts() -> None:
    rewards = torch.tensor([[1.0, 0.0, NAN], [1.0, 1.0, NAN], [NAN, NAN, NAN]])
    assert has_reward_spread(rewards).tolist() == [True, False, False]


def test_bad_input_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"normalize='mean'.*'std', 'none'"):
        group_advantages(torch.zeros(1, 2), "mean")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"\(4,\).*\[P, G\]"):
        group_advantages(torch.zeros(4))
    with pytest.raises(ConfigError, match="infinite"):
        group_advantages(torch.tensor([[1.0, math.inf]]))
