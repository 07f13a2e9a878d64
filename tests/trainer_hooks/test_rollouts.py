"""Samples of several turns: one row of tokens, each as it was sampled."""

from __future__ import annotations

import pytest

from rollout.errors import ConfigError
from rollout.requests import DynamicInferenceRequest, Status
from tests.trainer_hooks.fakes import finished_request
from trainer_hooks import collate_rollouts
from trainer_hooks.rollouts import Rollout, as_rollout

TOOL = [70, 71]


def three_turns() -> list[DynamicInferenceRequest]:
    """Versions move on between turns and within the second."""
    return [
        finished_request([1, 2, 3], [10, 11], versions=[0, 0]),
        finished_request([1, 2, 3, 10, 11, *TOOL], [20], versions=[1]),
        finished_request(
            [1, 2, 3, 10, 11, *TOOL, 20], [30, 31, 32], versions=[1, 2, 2], kv_versions=[1, 1, 1.5]
        ),
    ]


def test_a_rollouts_tokens_are_those_of_its_last_turn() -> None:
    rollout = Rollout(three_turns())
    assert rollout.tokens_T.tolist() == [1, 2, 3, 10, 11, *TOOL, 20, 30, 31, 32]
    assert rollout.num_prompt_tokens == 3
    assert rollout.completion_ids == [10, 11, *TOOL, 20, 30, 31, 32]
    assert rollout.generated_ids == [10, 11, 20, 30, 31, 32]
    assert rollout.policy_versions.tolist() == [0, 0, 1, 1, 2, 2]


def test_the_mask_is_on_the_generated_tokens_of_all_turns_and_on_nothing_else() -> None:
    batch = collate_rollouts([Rollout(three_turns())], [1.0], train_version=2)
    assert batch.mask_BT[0].int().tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1]
    assert batch.behaviour_logprobs_BT[0].tolist() == [0, 0, 0, -1, -2, 0, 0, -1, -1, -2, -3]
    assert batch.policy_lag_BT[0].tolist() == [0, 0, 0, 2, 2, 0, 0, 1, 1, 0, 0]
    assert batch.kv_lag_BT[0].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0, 0.5]
    lengths = (batch.prompt_lengths_B, batch.completion_lengths_B, batch.lengths_B)
    assert [int(each_B[0]) for each_B in lengths] == [3, 6, 11]


def test_kv_staleness_is_that_of_the_turn_that_generated_the_token() -> None:
    # Turn 1 wrote the KV of turn 0's tokens anew, or found it: its own sampling used that of 0.
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


def test_one_failed_turn_fails_the_rollout() -> None:
    turns = three_turns()
    turns[-1] = finished_request(
        turns[-1].prompt_tokens.tolist(), [30], versions=[1], status=Status.FAILED
    )
    batch = collate_rollouts([Rollout(turns)], [1.0], train_version=2)
    assert not batch.mask_BT.any()
    assert batch.rewards_B.isnan().all()


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([1, 2, 3, 10, 99, *TOOL], "token 99 at position 4, where the turn before has 11"),
        ([1, 2, 3, 10], "ends at position 4, the turn before has 5 tokens"),
        ([7], "token 7 at position 0, where the turn before has 1"),
    ],
)
def test_a_turn_that_was_encoded_again_is_refused_naming_the_position(
    prompt: list[int], named: str
) -> None:
    first = finished_request([1, 2, 3], [10, 11], versions=[0, 0])
    second = finished_request(prompt, [20], versions=[0])
    with pytest.raises(ConfigError, match=rf"turn 1 was .*re-tokenised.*{named}"):
        Rollout([first, second])


def test_a_rollout_has_a_turn() -> None:
    with pytest.raises(ConfigError, match="at least one request"):
        Rollout([])
