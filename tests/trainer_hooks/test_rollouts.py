"""Rollout: samples of several turns as rows of tokens, each where it was sampled."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from rollout.errors import ConfigError
from rollout.requests import DynamicInferenceEventType, DynamicInferenceRequest, Status
from tests.trainer_hooks.fakes import finished_request
from trainer_hooks import PromptItem, RewardRunner, collate_rollouts, group_advantages
from trainer_hooks.rewards import WeightedRewards, score_rollouts
from trainer_hooks.rollouts import Rollout, as_rollout

TOOL = [70, 71]


def three_turns() -> list[DynamicInferenceRequest]:
    """Return three turns; versions rise between turns and within the second."""
    return [
        finished_request([1, 2, 3], [10, 11], versions=[0, 0]),
        finished_request([1, 2, 3, 10, 11, *TOOL], [20], versions=[1]),
        finished_request(
            [1, 2, 3, 10, 11, *TOOL, 20], [30, 31, 32], versions=[1, 2, 2], kv_versions=[1, 1, 1.5]
        ),
    ]


def test_rollout_tokens_are_the_tokens_of_its_last_turn() -> None:
    rollout = Rollout(three_turns())
    assert rollout.tokens_T.tolist() == [1, 2, 3, 10, 11, *TOOL, 20, 30, 31, 32]
    assert rollout.num_prompt_tokens == 3
    assert rollout.completion_ids == [10, 11, *TOOL, 20, 30, 31, 32]
    assert rollout.generated_ids == [10, 11, 20, 30, 31, 32]
    assert rollout.policy_versions.tolist() == [0, 0, 1, 1, 2, 2]


def test_mask_covers_exactly_the_generated_tokens_of_all_turns() -> None:
    batch = collate_rollouts([Rollout(three_turns())], [1.0], train_version=2)
    assert batch.mask_BT[0].int().tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1]
    assert batch.behaviour_logprobs_BT[0].tolist() == [0, 0, 0, -1, -2, 0, 0, -1, -1, -2, -3]
    assert batch.policy_lag_BT[0].tolist() == [0, 0, 0, 2, 2, 0, 0, 1, 1, 0, 0]
    assert batch.kv_lag_BT[0].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0, 0.5]
    lengths = (batch.prompt_lengths_B, batch.completion_lengths_B, batch.lengths_B)
    assert [int(each_B[0]) for each_B in lengths] == [3, 6, 11]


def test_kv_staleness_comes_from_the_turn_that_generated_the_token() -> None:
    # Turn 1 rewrote the KV of turn 0's tokens or reused it; turn 0's sampling used its own KV.
    turns = three_turns()
    batch = collate_rollouts([Rollout(turns)], [1.0], train_version=5)
    for turn in turns:
        start, end = len(turn.prompt_tokens), turn.num_tokens
        expected = turn.staleness_at(5)[1][start:]
        assert batch.kv_staleness_BT[0, start:end].tolist() == expected.tolist()


def test_rollouts_of_one_turn_and_of_several_share_a_batch() -> None:
    single = finished_request([5], [6], versions=[2])
    batch = collate_rollouts([Rollout(three_turns()), single], [1.0, 0.5], train_version=2)
    assert batch.tokens_BT[1].tolist() == [5, 6] + [0] * 9
    assert batch.mask_BT.sum(dim=1).tolist() == [6, 1]
    assert as_rollout(single).requests == [single]


def test_rollout_with_a_failed_turn_has_failed() -> None:
    turns = three_turns()
    turns[-1] = finished_request(
        turns[-1].prompt_tokens.tolist(), [30], versions=[1], status=Status.FAILED
    )
    turns[-1].add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, RuntimeError("no memory"))
    assert Rollout(turns).error == "RuntimeError('no memory')"
    assert Rollout(three_turns()).error is None
    batch = collate_rollouts([Rollout(turns)], [1.0], train_version=2)
    assert not batch.mask_BT.any()
    assert batch.rewards_B.isnan().all()


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([1, 2, 3, 10, 99, *TOOL], "token 99 at position 4, where the previous turn has 11"),
        ([1, 2, 3, 10], "ends at position 4, the previous turn has 5 tokens"),
        ([7], "token 7 at position 0, where the previous turn has 1"),
    ],
)
def test_rollout_refuses_a_re_encoded_turn_naming_the_position(
    prompt: list[int], named: str
) -> None:
    first = finished_request([1, 2, 3], [10, 11], versions=[0, 0])
    second = finished_request(prompt, [20], versions=[0])
    with pytest.raises(ConfigError, match=rf"turn 1 was .*re-tokenised.*{named}"):
        Rollout([first, second])


def test_rollout_without_turns_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one request"):
        Rollout([])


# ---- several token sequences


def with_thinking_dropped() -> Rollout:
    """Return two turns of one token sequence, and a third that starts another."""
    turns = [
        finished_request([1, 2, 3], [10, 11], versions=[0, 0]),
        finished_request([1, 2, 3, 10, 11, *TOOL], [20], versions=[1]),
        finished_request([1, 2, 3, 11, 20, 9], [30, 31], versions=[1, 2]),
    ]
    return Rollout(turns, sequence_starts=(0, 2))


def test_sequence_starts_make_rows_with_their_own_mask_and_log_probs() -> None:
    single = finished_request([5], [6], versions=[2])
    batch = collate_rollouts([with_thinking_dropped(), single], [1.0, 0.5], train_version=2)
    assert batch.rollout_index_B.tolist() == [0, 0, 1]
    assert batch.tokens_BT.tolist() == [
        [1, 2, 3, 10, 11, *TOOL, 20],
        [1, 2, 3, 11, 20, 9, 30, 31],
        [5, 6, 0, 0, 0, 0, 0, 0],
    ]
    assert batch.mask_BT[:2].int().tolist() == [[0, 0, 0, 1, 1, 0, 0, 1], [0] * 6 + [1, 1]]
    assert batch.behaviour_logprobs_BT[1].tolist() == [0] * 6 + [-1, -2]
    assert batch.policy_lag_BT[0].tolist() == [0, 0, 0, 2, 2, 0, 0, 1]
    assert batch.prompt_lengths_B.tolist() == [3, 6, 1]
    assert batch.completion_lengths_B.tolist() == [3, 2, 1]
    assert batch.per_rollout(batch.completion_lengths_B).tolist() == [5, 1]


def test_rewards_B_is_refused_for_rollouts_of_several_rows() -> None:
    # Four rows would view as two groups of two, which the rollouts are not.
    rollouts = [with_thinking_dropped(), with_thinking_dropped()]
    batch = collate_rollouts(rollouts, [1.0, 0.0], train_version=2)
    with pytest.raises(ConfigError, match=r"2 of 2 rollouts .* 4 rows .*per_row"):
        batch.rewards_B.view(-1, 2)
    advantages_B = batch.per_row(group_advantages(batch.rewards_R.view(-1, 2), "none"))
    assert advantages_B.tolist() == [0.5, 0.5, -0.5, -0.5]
    with pytest.raises(ConfigError, match=r"4 values of shape \(4,\) for 2 rollouts"):
        batch.per_row(torch.zeros(4))


def test_select_keeps_the_rewards_of_the_rows_rollouts() -> None:
    single = finished_request([5], [6], versions=[2])
    batch = collate_rollouts([with_thinking_dropped(), single], [1.0, 0.5], train_version=2)
    part = batch.select(torch.tensor([2, 1]))
    assert part.rewards_B.tolist() == [0.5, 1.0]
    assert part.first_row_R.tolist() == [1, 0]


def test_rollout_with_a_failure_is_a_row_without_trained_tokens() -> None:
    failed = [Rollout([], failure="reset_error"), Rollout(three_turns(), failure="step_timeout")]
    assert [rollout.error for rollout in failed] == ["reset_error", "step_timeout"]
    batch = collate_rollouts([*failed, *three_turns()[:1]], [1.0, 1.0, 1.0], train_version=2)
    assert batch.lengths_B.tolist() == [0, 11, 5]
    assert batch.rewards_R.isnan().tolist() == [True, True, False]
    assert batch.mask_BT.any(dim=1).tolist() == [False, False, True]


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 3), (0, 2, 1)])
def test_sequence_starts_must_be_turns_in_order(starts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="indices of turns in order, 0 first"):
        Rollout(three_turns(), sequence_starts=starts)


# ---- rewards of their own


def scored(rollouts: list[Rollout], reward: RewardRunner | None = None) -> list[float]:
    item = PromptItem("ab", {"answer": 4})
    return asyncio.run(score_rollouts(reward, item, rollouts, None))


def test_score_rollouts_takes_a_rollouts_own_reward_with_its_terms() -> None:
    own = Rollout(three_turns(), reward=1.5, reward_terms={"found": 1.0, "steps": 0.5})
    failed = Rollout(three_turns(), reward=2.0, failure="step_error")
    nothing = Rollout(three_turns(), reward=math.nan)
    rewards = scored([own, failed, nothing])
    assert rewards[0] == 1.5
    assert rewards[0].terms == {"found": 1.0, "steps": 0.5}
    assert [math.isnan(reward) for reward in rewards] == [False, True, True]


def test_score_rollouts_adds_the_functions_reward_to_the_rollouts_own() -> None:
    def by_columns(completions: list[object], answer: list[int], found: list[int]) -> list[float]:
        return [float(a + (f or 0)) for a, f in zip(answer, found, strict=True)]

    rollouts = [
        Rollout(three_turns(), reward=10.0, columns={"found": 3}),
        Rollout(three_turns(), columns={"answer": 7}),
    ]
    assert scored(rollouts, RewardRunner(by_columns)) == [17.0, 7.0]


def test_score_rollouts_refuses_a_rollout_without_any_reward() -> None:
    with pytest.raises(ConfigError, match=r"no reward function.*reward=None"):
        scored([Rollout(three_turns())])


def test_score_rollouts_refuses_terms_of_the_same_name() -> None:
    reward = RewardRunner(WeightedRewards([lambda completions: [1.0]], names=["found"]))
    with pytest.raises(ConfigError, match=r"\['found'\] come from the reward function and from"):
        scored([Rollout(three_turns(), reward=1.0, reward_terms={"found": 1.0})], reward)
