"""collate_rollouts: layout, lags, failed rollouts, and refused log-probs."""

import math
from typing import Any

import pytest
import torch

from rollout.errors import ConfigError
from rollout.requests import Status
from rollout.sampling_params import SamplingParams
from tests.trainer_hooks.fakes import TRAINABLE, finished_request
from trainer_hooks import collate_rollouts
from trainer_hooks.collate import check_logprobs_match


def two_rollouts() -> list:
    return [
        finished_request([10, 11], [20, 21, 22], versions=[1, 1, 2], kv_versions=[1, 1, 1.25]),
        finished_request([12], [23], versions=[2]),
    ]


def test_rows_are_prompt_then_completion_padded_on_the_right() -> None:
    batch = collate_rollouts(two_rollouts(), [1.0, 0.0], train_version=3, pad_id=99)
    assert batch.tokens_BT.tolist() == [[10, 11, 20, 21, 22], [12, 23, 99, 99, 99]]
    assert batch.mask_BT.tolist() == [[False, False, True, True, True], [False, True] + [False] * 3]
    assert batch.attention_mask_BT.sum(dim=1).tolist() == [5, 2]
    assert batch.position_ids_BT[0].tolist() == [0, 1, 2, 3, 4]
    assert batch.prompt_lengths_B.tolist() == [2, 1]
    assert batch.completion_lengths_B.tolist() == [3, 1]
    assert len(batch) == 2


def test_collate_rollouts_column_t_belongs_to_token_t() -> None:
    batch = collate_rollouts(two_rollouts(), [1.0, 0.0], train_version=3)
    assert batch.behaviour_logprobs_BT.tolist() == [[0, 0, -1, -2, -3], [0, -1, 0, 0, 0]]
    assert batch.policy_lag_BT.tolist() == [[0, 0, 2, 2, 1], [0, 1, 0, 0, 0]]
    assert batch.kv_lag_BT.tolist() == [[0, 0, 0, 0, 0.75], [0, 0, 0, 0, 0]]


def test_kv_staleness_is_the_age_of_the_tokens_own_kv_entry() -> None:
    # The KV of token i is written when token i + 1 is sampled; the last token's is never written.
    batch = collate_rollouts(two_rollouts(), [1.0, 0.0], train_version=3)
    assert batch.kv_staleness_BT.tolist() == [[0, 0, 2, 1, 1], [0, 1, 0, 0, 0]]


@pytest.mark.parametrize("failed_reward", [None, math.nan])
def test_a_failed_rollout_is_masked_out_and_has_no_reward(failed_reward: float | None) -> None:
    batch = collate_rollouts(two_rollouts(), [failed_reward, 0.5], train_version=2)
    assert batch.mask_BT.sum(dim=1).tolist() == [0, 1]
    assert math.isnan(batch.rewards_B[0])
    assert batch.rewards_B[1] == 0.5
    assert batch.policy_lag_BT[0].tolist() == [0, 0, 0, 0, 0]


def test_failed_request_is_a_failed_rollout_whatever_its_reward() -> None:
    aborted = finished_request([1], [2, 3], versions=[0, 0], status=Status.FAILED)
    never_ran = finished_request([1], [], versions=[], status=Status.FAILED, logprobs=[])
    batch = collate_rollouts([aborted, never_ran], [1.0, 1.0], train_version=0)
    assert not batch.mask_BT.any()
    assert batch.rewards_B.isnan().all()
    assert batch.tokens_BT.tolist() == [[1, 2, 3], [1, 0, 0]]


def test_select_keeps_the_given_rows_and_drops_columns_of_padding() -> None:
    batch = collate_rollouts(two_rollouts(), [1.0, 0.0], train_version=3)
    chosen = batch.select(torch.tensor([1]))
    assert chosen.tokens_BT.tolist() == [[12, 23]]
    assert chosen.rewards_B.tolist() == [0.0]
    assert chosen.train_version == 3
    assert batch.select(torch.tensor([True, False])).tokens_BT.shape == (1, 5)


def test_without_truncated_masks_truncated_rollouts_and_keeps_their_rewards() -> None:
    rollouts = [finished_request([1], [2, 3], versions=[0, 0]) for _ in range(2)]
    rollouts[0].finish_reason, rollouts[1].finish_reason = "length", "stop"
    batch = collate_rollouts(rollouts, [0.25, 1.0], train_version=0)
    kept = batch.without_truncated()
    assert batch.is_truncated_B.tolist() == [True, False]
    assert batch.mask_BT.sum(dim=1).tolist() == [2, 2]
    assert kept.mask_BT.sum(dim=1).tolist() == [0, 2]
    assert kept.rewards_B.tolist() == [0.25, 1.0]


def sampled(**fields: Any) -> SamplingParams:
    return SamplingParams(return_log_probs=True, **fields)


@pytest.mark.parametrize(
    ("params", "temperature", "mode"),
    [
        (sampled(), 1.0, "temperature"),
        (sampled(logprobs_mode="temperature", temperature=0.7), 0.7, "temperature"),
        (sampled(logprobs_mode="temperature", top_k=5), 1.0, "temperature"),
        (sampled(logprobs_mode="processed", temperature=0.7), 0.7, "temperature"),
        (sampled(logprobs_mode="processed", top_p=0.9), 1.0, "processed"),
        (sampled(logprobs_mode="processed", top_k=5, temperature=0.7), 0.7, "processed"),
        # Where nothing is truncated the two are the same numbers.
        (sampled(logprobs_mode="temperature", temperature=0.7), 0.7, "processed"),
        (sampled(top_p=1.0), 1.0, "processed"),
    ],
)
def test_collate_rollouts_accepts_log_probs_of_the_given_logprobs_mode(
    params: SamplingParams, temperature: float, mode: Any
) -> None:
    check_logprobs_match(params, temperature, mode)


@pytest.mark.parametrize(
    ("params", "temperature", "mode", "named"),
    [
        (sampled(temperature=0.7), 0.7, "temperature", "'raw'.*0.7.*'temperature'"),
        (sampled(temperature=0.7), 0.7, "processed", "'raw'.*0.7.*'processed'"),
        (sampled(temperature=0.7), 1.0, "temperature", "0.7.*=1.0"),
        (sampled(logprobs_mode="temperature", temperature=0.7), 1.0, "temperature", "0.7.*=1.0"),
        (sampled(temperature=0.0), 1.0, "temperature", "0.0.*1.0"),
        (sampled(temperature=0.0, logprobs_mode="temperature"), 0.0, "temperature", "above 0"),
        (sampled(), 1.0, "raw", "logprobs_mode='raw' is not known.*'temperature', 'processed'"),
        # The true probability of the draw is another number than what the trainer recomputes.
        (
            sampled(logprobs_mode="processed", top_p=0.9),
            1.0,
            "temperature",
            "'processed'.*top_p=0.9.*'temperature'.*logprobs_mode='processed' to collate_rollouts",
        ),
        (sampled(logprobs_mode="temperature", min_p=0.1), 1.0, "processed", "min_p=0.1.*'proc"),
        (sampled(repetition_penalty=1.5), 1.0, "temperature", "'raw'.*repetition_penalty=1.5"),
        (sampled(logit_bias={3: 1.0}), 1.0, None, "'raw'.*logit_bias"),
        # `raw` says of neither that it is meant.
        (sampled(top_k=5), 1.0, "temperature", "'raw'.*top_k=5.*sample with.*'temperature'"),
    ],
)
def test_collate_rollouts_refuses_log_probs_of_another_distribution_naming_both(
    params: SamplingParams, temperature: float, mode: Any, named: str
) -> None:
    request = finished_request([1], [2], versions=[0], params=params)
    with pytest.raises(ConfigError, match=named):
        collate_rollouts(
            [request], [1.0], train_version=0, temperature=temperature, logprobs_mode=mode
        )


def test_collate_rollouts_without_logprobs_mode_takes_the_one_of_the_sampling() -> None:
    true, plain, other = (
        finished_request([1], [2], versions=[0], params=params)
        for params in (
            sampled(logprobs_mode="processed", top_p=0.9),
            sampled(logprobs_mode="temperature"),
            sampled(logprobs_mode="temperature", top_p=0.9),
        )
    )
    for requests in ([true], [plain, true], [other, plain]):
        assert collate_rollouts(requests, [1.0] * len(requests), train_version=0).mask_BT.any()
    with pytest.raises(ConfigError, match=r"'temperature'.*top_p=0\.9.*'processed'"):
        collate_rollouts([true, other], [1.0, 1.0], train_version=0)


def test_collate_rollouts_refuses_rollouts_without_log_probs() -> None:
    silent = finished_request([1], [2], versions=[0], params=SamplingParams())
    with pytest.raises(ConfigError, match="return_log_probs=True"):
        collate_rollouts([silent], [1.0], train_version=0)
    torn = finished_request([1], [2, 3], versions=[0, 0], logprobs=[-1.0, math.nan])
    with pytest.raises(ConfigError, match=r"request 7.*without a log-prob"):
        collate_rollouts([torn], [1.0], train_version=0)


def test_collate_rollouts_refuses_a_train_version_older_than_a_token() -> None:
    request = finished_request([1], [2], versions=[5], params=TRAINABLE)
    with pytest.raises(ConfigError, match=r"train_version=4.*version 5"):
        collate_rollouts([request], [1.0], train_version=4)


def test_collate_rollouts_refuses_another_number_of_rewards() -> None:
    with pytest.raises(ConfigError, match="2 requests and 1 rewards"):
        collate_rollouts(two_rollouts(), [1.0], train_version=3)
    with pytest.raises(ConfigError, match="0 requests"):
        collate_rollouts([], [], train_version=3)


def test_collate_rollouts_refuses_a_request_without_prompt_tokens() -> None:
    without = finished_request([10, 11], [20, 21], versions=[1, 1])
    without.prompt_tokens = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ConfigError, match=rf"request {without.request_id} has no prompt tokens.*"):
        collate_rollouts([without], [1.0], train_version=1)
    collate_rollouts([without], [None], train_version=1)  # a failed one is not trained on
