"""Rollouts of several token sequences: each counts once, however the batch is divided."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.run_seed import run_seed
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.trainer_hooks.fakes import finished_request
from tests.trainer_hooks.loss_batches import random_batch
from trainer_hooks import (
    PolicyLossConfig,
    Rollout,
    RolloutBatch,
    UpdateSettings,
    accumulate_gradients,
    collate_rollouts,
    policy_loss,
    update_policy,
)
from trainer_hooks.losses.logprobs import token_logprobs

ROLLOUT_INDEX_B = torch.tensor([0, 0, 1, 2, 2, 2])
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


def with_one_row_each(values_BT: torch.Tensor) -> torch.Tensor:
    """Return the rows of each rollout one behind the other in one row; [3, 3 T], padded with 0."""
    rows = [values_BT[index == ROLLOUT_INDEX_B].flatten() for index in range(3)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_policy_loss_weighs_a_rollout_of_several_rows_like_one_row(
    seed: int, aggregation: Any
) -> None:
    batch = random_batch(seed)
    config = PolicyLossConfig(
        kind="cispo", aggregation=aggregation, kl_coefficient=0.1, entropy_coefficient=0.01
    )
    advantages_BT = batch.advantages_B1[ROLLOUT_INDEX_B].expand(batch.mask_BT.shape)
    num_tokens_R = torch.zeros(3, dtype=torch.int64)
    num_tokens_R.index_add_(0, ROLLOUT_INDEX_B, batch.mask_BT.sum(dim=1))

    def loss_and_gradient(place: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
        columns = (logprobs_BT, batch.behaviour_BT, advantages_BT, batch.mask_BT)
        loss, _ = policy_loss(
            *(place(column) for column in columns),
            config,
            reference_logprobs_BT=place(batch.reference_BT),
            entropies_BT=place(batch.behaviour_BT.abs()),
            **options,
        )
        loss.backward()
        assert logprobs_BT.grad is not None
        return loss.detach(), logprobs_BT.grad

    ours = loss_and_gradient(lambda x: x, rollout_tokens_B=num_tokens_R[ROLLOUT_INDEX_B])
    assert_close(ours, loss_and_gradient(with_one_row_each))
    if aggregation != "token-mean":
        rows = loss_and_gradient(lambda x: x)
        assert not torch.allclose(ours[0], rows[0]), "each row counts as a rollout"


@pytest.fixture(scope="module")
def policy() -> Any:
    return tiny_model("qwen3", std=0.05).train()


def rollouts_of_several_sequences() -> RolloutBatch:
    """Return five rollouts of 1, 3, 2, 1 and 2 rows; the second failed, the last was truncated."""
    generator = torch.Generator().manual_seed(run_seed())

    def ids(count: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()

    rollouts = []
    for lengths in ((4,), (2, 9, 5), (13, 1), (7,), (3, 17)):
        turns = []
        for length in lengths:
            logprobs = (-torch.rand(length, generator=generator) - 4.0).tolist()
            turn = finished_request(ids(3), ids(length), versions=[0] * length, logprobs=logprobs)
            turn.finish_reason = "length" if length == 17 else "stop"
            turns.append(turn)
        rollouts.append(Rollout(turns, sequence_starts=range(len(turns))))
    return collate_rollouts(rollouts, [1.0, None, 0.0, 2.0, 1.0], train_version=0)


def advantages_of(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    advantages_B1 = batch.per_row(torch.tensor([1.0, 0.0, -1.5, 0.7, 2.0]))[:, None]
    return {"advantages_BT": advantages_B1.expand(batch.tokens_BT.shape)}


def gradients(policy: Any) -> list[torch.Tensor]:
    return [p.grad.clone() for p in policy.parameters() if p.grad is not None]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("masks_truncated", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_may_divide_the_rows_of_a_rollout(
    policy: Any, aggregation: Any, masks_truncated: bool, is_packed: bool
) -> None:
    batch = rollouts_of_several_sequences()
    batch = batch.without_truncated() if masks_truncated else batch
    config = PolicyLossConfig(kind="cispo", aggregation=aggregation)
    policy.zero_grad()
    loss, _ = policy_loss(
        token_logprobs(policy(batch.tokens_BT).logits, batch.tokens_BT),
        batch.behaviour_logprobs_BT,
        advantages_of(batch)["advantages_BT"],
        batch.mask_BT,
        config,
        rollout_tokens_B=batch.rollout_tokens_B,
    )
    loss.backward()
    expected = gradients(policy)
    policy.zero_grad()
    settings = UpdateSettings(max_tokens=20, is_packed=is_packed)
    metrics = accumulate_gradients(policy, batch, advantages_of(batch), config, settings)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6, abs=1e-6)
    for ours, theirs in zip(gradients(policy), expected, strict=True):
        # An element is a sum of terms as large as the largest ones, in another order.
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6 + 1e-5 * float(theirs.detach().abs().max()))


def test_minibatches_keep_the_rows_of_a_rollout_together(policy: Any) -> None:
    batch = rollouts_of_several_sequences()
    parts = batch.split_rollouts(2)
    assert sorted(torch.cat(parts).tolist()) == [0, 4, 5, 6, 7, 8], "the second is masked"
    owners = [set(batch.rollout_index_B[rows].tolist()) for rows in parts]
    assert not owners[0] & owners[1]
    assert [len(each) for each in owners] == [2, 2]
    (kept,) = batch.split_rollouts(1, torch.tensor([False, True, True, True, False]))
    assert sorted(kept.tolist()) == [4, 5, 6]
    assert batch.split_rollouts(3, torch.zeros(5, dtype=torch.bool)) == []


def test_update_policy_steps_on_each_minibatchs_rollouts_alone(policy: Any) -> None:
    batch, config = rollouts_of_several_sequences(), PolicyLossConfig(kind="grpo")
    plain, ours = copy.deepcopy(policy), copy.deepcopy(policy)
    torch.manual_seed(1)
    for rows in batch.split_rollouts(2):
        part = batch.select(rows)
        columns = advantages_of(batch)["advantages_BT"][rows, : part.tokens_BT.shape[1]]
        plain.zero_grad()
        logits = plain(part.tokens_BT).logits
        loss, _ = policy_loss(
            token_logprobs(logits, part.tokens_BT), part.behaviour_logprobs_BT, columns,
            part.mask_BT, config, rollout_tokens_B=part.rollout_tokens_B,
        )  # fmt: skip
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.optim.SGD(plain.parameters(), lr=0.05).step()
    torch.manual_seed(1)
    settings = UpdateSettings(num_minibatches=2, max_tokens=20, is_packed=True)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    assert len(update_policy(ours, optimizer, batch, advantages_of(batch), config, settings)) == 2
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_close(mine, theirs, rtol=1e-5, atol=1e-6 + 1e-5 * float(theirs.detach().abs().max()))
