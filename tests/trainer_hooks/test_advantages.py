"""Advantages: group_advantages, GAE and REINFORCE++ against values worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from rollout.errors import ConfigError
from trainer_hooks import (
    gae_advantages,
    group_advantages,
    has_reward_spread,
    overlong_penalties,
    reinforce_plus_plus_advantages,
)
from trainer_hooks.losses.advantages import whitened

NAN = math.nan


def test_group_advantages_std_divides_by_the_sample_deviation() -> None:
    # mean 0.25; deviations 0.75, -0.25 x 3; variance (0.5625 + 3 * 0.0625) / 3 = 0.25
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert_close(advantages, torch.tensor([[1.5, -0.5, -0.5, -0.5]]), rtol=1e-5, atol=0.0)


def test_group_advantages_none_only_subtracts_the_mean() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), normalize="none")
    assert_close(advantages, torch.tensor([[0.75, -0.25, -0.25, -0.25]]))


def test_group_advantages_ignore_failed_rollouts_and_give_them_zero() -> None:
    with_failure = group_advantages(torch.tensor([[1.0, NAN, 0.0, NAN]]))
    alone = group_advantages(torch.tensor([[1.0, 0.0]]))
    assert_close(with_failure, torch.tensor([[alone[0, 0], 0.0, alone[0, 1], 0.0]]))


@pytest.mark.parametrize("normalize", ["std", "none"])
@pytest.mark.parametrize("row", [[0.1] * 7, [0.3, NAN, 0.3, NAN], [5.0, NAN], [NAN, NAN]])
def test_group_advantages_without_reward_spread_are_exactly_zero(
    row: list[float], normalize: str
) -> None:
    advantages = group_advantages(torch.tensor([row]), normalize)  # type: ignore[arg-type]
    assert torch.equal(advantages, torch.zeros(1, len(row)))


def test_group_advantages_accept_integer_rewards() -> None:
    assert_close(group_advantages(torch.tensor([[0, 2]]), "none"), torch.tensor([[-1.0, 1.0]]))


@given(st.lists(st.lists(st.floats(-100, 100), min_size=4, max_size=4), min_size=1, max_size=5))
def test_group_advantages_add_up_to_zero(rewards: list[list[float]]) -> None:
    advantages = group_advantages(torch.tensor(rewards))
    assert_close(advantages.sum(dim=1), torch.zeros(len(rewards)), rtol=0.0, atol=1e-3)


@given(st.lists(st.integers(0, 10), min_size=2, max_size=8), st.integers(1, 9), st.integers(-9, 9))
def test_group_advantages_std_do_not_depend_on_the_scale_of_rewards(
    rewards: list[int], scale: int, shift: int
) -> None:
    row = torch.tensor([rewards], dtype=torch.float32)
    assert_close(group_advantages(row * scale + shift), group_advantages(row), rtol=1e-3, atol=1e-4)


def test_has_reward_spread_ignores_failed_rollouts() -> None:
    rewards = torch.tensor([[1.0, 0.0, NAN], [1.0, 1.0, NAN], [NAN, NAN, NAN]])
    assert has_reward_spread(rewards).tolist() == [True, False, False]


def test_group_advantages_refuse_bad_input_by_name() -> None:
    with pytest.raises(ConfigError, match=r"normalize='mean'.*'std', 'none'"):
        group_advantages(torch.zeros(1, 2), "mean")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"\(4,\).*\[P, G\]"):
        group_advantages(torch.zeros(4))
    with pytest.raises(ConfigError, match="infinite"):
        group_advantages(torch.tensor([[1.0, math.inf]]))


def test_leave_one_out_subtracts_the_mean_of_the_other_rollouts() -> None:
    advantages = group_advantages(
        torch.tensor([[1.0, 0.0, 0.5, NAN]]), "none", baseline="leave_one_out"
    )
    assert_close(advantages, torch.tensor([[0.75, -0.75, 0.0, 0.0]]))


@given(st.lists(st.integers(-9, 9) | st.none(), min_size=1, max_size=8))
def test_every_baseline_ignores_failed_rollouts(rewards: list[int | None]) -> None:
    row = [math.nan if reward is None else float(reward) for reward in rewards]
    kept = [reward for reward in row if not math.isnan(reward)]
    for baseline in ("mean", "leave_one_out"):
        advantages = group_advantages(torch.tensor([row]), "none", baseline)  # type: ignore[arg-type]
        failed = torch.tensor(row).isnan()
        assert (advantages[0, failed] == 0).all()
        if kept:
            alone = group_advantages(torch.tensor([kept]), "none", baseline)  # type: ignore[arg-type]
            assert_close(advantages[0, ~failed], alone[0])


def test_overlong_penalties_fall_to_minus_one() -> None:
    penalties = overlong_penalties(torch.tensor([10, 80, 90, 100, 130]), 100, 20)
    assert_close(penalties, torch.tensor([0.0, 0.0, -0.5, -1.0, -1.0]))
    with pytest.raises(ConfigError, match="cache_length=0"):
        overlong_penalties(torch.tensor([1]), 100, 0)


def test_gae_advantages_of_two_steps() -> None:
    # delta_1 = 1 - 0.5 = 0.5; delta_0 = 0.9 * 0.5 - 0.2 = 0.25; A_0 = 0.25 + 0.9 * 0.8 * 0.5
    advantages, returns = gae_advantages(
        torch.tensor([[0.0, 1.0]]),
        torch.tensor([[0.2, 0.5]]),
        torch.ones(1, 2),
        gamma=0.9,
        lam=0.8,
    )
    assert_close(advantages, torch.tensor([[0.61, 0.5]]))
    assert_close(returns, torch.tensor([[0.81, 1.0]]))


def test_gae_advantages_bootstrap_a_truncated_rollout() -> None:
    advantages, _ = gae_advantages(
        torch.zeros(2, 1),
        torch.zeros(2, 1),
        torch.ones(2, 1),
        gamma=0.5,
        bootstrap_values_B=torch.tensor([4.0, 0.0]),
    )
    assert_close(advantages, torch.tensor([[2.0], [0.0]]))


def gae_by_loop(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Return GAE by the paper's recursion over the trained tokens of one rollout."""
    advantages, advantage, next_value = torch.zeros_like(rewards), 0.0, 0.0
    for position in reversed(mask.nonzero().flatten().tolist()):
        delta = float(rewards[position]) + gamma * next_value - float(values[position])
        advantage = delta + gamma * lam * advantage
        advantages[position], next_value = advantage, float(values[position])
    return advantages


@given(
    seed=st.integers(0, 10_000),
    num_positions=st.integers(1, 20),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_gae_advantages_equal_the_recursion_over_trained_tokens(
    seed: int, num_positions: int, gamma: float, lam: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, num_positions, generator=generator)
    mask = torch.rand(3, num_positions, generator=generator) > 0.4
    spoiled = values.masked_fill(~mask, NAN)
    advantages, returns = gae_advantages(rewards, spoiled, mask, gamma=gamma, lam=lam)
    for row in range(3):
        expected = gae_by_loop(rewards[row], values[row], mask[row], gamma, lam)
        assert_close(advantages[row], expected, rtol=1e-4, atol=1e-5)
    assert_close(returns, (advantages + values).masked_fill(~mask, 0.0))


def test_gae_advantages_of_a_failed_rollout_are_zero() -> None:
    advantages, _ = gae_advantages(
        torch.tensor([[0.0, NAN], [0.0, 1.0]]), torch.zeros(2, 2), torch.ones(2, 2), lam=1.0
    )
    assert_close(advantages, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


def test_gae_advantages_refuse_bad_input_by_name() -> None:
    with pytest.raises(ConfigError, match=r"lam=1\.5"):
        gae_advantages(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), lam=1.5)
    with pytest.raises(ConfigError, match="one shape"):
        gae_advantages(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2))


def test_reinforce_plus_plus_advantages_whiten_returns_over_all_trained_tokens() -> None:
    mask_BT = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0]], dtype=torch.bool)
    rewards_BT = torch.zeros(3, 5)
    rewards_BT[0, 4], rewards_BT[1, 2], rewards_BT[2, 3] = 1.0, -2.0, math.nan
    rewards_BT[0, 1] = -0.5
    rewards_BT[~mask_BT] = 9.0
    # By hand: discounted by 0.5 per trained token; tool output takes no time.
    returns = torch.tensor([-0.5 + 0.25, 0.5, 1.0, -1.0, -2.0])
    expected_BT = torch.zeros(3, 5)
    expected_BT[:2][mask_BT[:2]] = (returns - returns.mean()) / (returns.var() + 1e-8).sqrt()
    assert_close(reinforce_plus_plus_advantages(rewards_BT, mask_BT, 0.5), expected_BT)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4, 16_777_216.0, 1e30, 3e38])
@pytest.mark.parametrize("normalize", ["std", "none"])
def test_group_advantages_of_rewards_equal_up_to_rounding_are_zero(
    size: float, normalize: str
) -> None:
    reward = torch.tensor(size)
    above = torch.nextafter(reward, torch.tensor(math.inf))
    rewards = torch.stack([reward, above, reward, reward])[None]
    assert not has_reward_spread(rewards).any()
    advantages = group_advantages(rewards, normalize)  # type: ignore[arg-type]
    assert torch.equal(advantages, torch.zeros(1, 4))


@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]),
    st.integers(-60, 60),
    st.lists(st.integers(-3, 3), min_size=2, max_size=8),
)
def test_group_advantages_are_finite_and_of_unit_size_at_any_scale(
    dtype: torch.dtype, exponent: int, rewards: list[int]
) -> None:
    scale = 1.0 if dtype is torch.int64 else 2.0**exponent
    row = (torch.tensor([rewards], dtype=torch.float64) * scale).to(dtype)
    advantages = group_advantages(row)
    assert advantages.isfinite().all()
    assert advantages.dtype is torch.float32
    assert advantages.abs().max() < len(rewards)
    assert bool(has_reward_spread(row)) == (len(set(rewards)) > 1)
    if scale >= 1.0:
        assert_close(advantages, group_advantages(torch.tensor([rewards])), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("values", [[7.0], [], [1e8, 1e8 + 8.0], [0.1] * 5])
def test_whitened_values_without_spread_are_zero(values: list[float]) -> None:
    mask = torch.tensor([[True] * len(values) + [False]])
    row = torch.tensor([[*values, NAN]])
    assert torch.equal(whitened(row, mask), torch.zeros(1, len(values) + 1))
    advantages = reinforce_plus_plus_advantages(row, mask, gamma=0.0)  # returns are rewards then
    assert torch.equal(advantages, torch.zeros(1, len(values) + 1))
