"""update_policy by micro-batches, packed or padded, has the gradients of the whole batch."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from rollout.errors import ConfigError
from tests.run_seed import run_seed
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.trainer_hooks.fakes import finished_request
from trainer_hooks import PolicyLossConfig, Rollout, RolloutBatch, collate_rollouts, policy_loss
from trainer_hooks.losses.logprobs import token_logprobs
from trainer_hooks.update.micro_batches import (
    UpdateSettings,
    accumulate_gradients,
    compute_logprobs,
    split_among_ranks,
    split_micro_batches,
    update_policy,
)
from trainer_hooks.update.reference import ReferencePolicy

EXACT = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def policy() -> Any:
    return tiny_model("qwen3", std=0.05).train()


def random_batch() -> RolloutBatch:
    """Return eight rollouts of long-tailed lengths, of which one failed and one was truncated."""
    generator = torch.Generator().manual_seed(run_seed())

    def ids(count: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()

    requests = []
    for length in (1, 2, 3, 3, 5, 8, 13, 29):
        logprobs = (-torch.rand(length, generator=generator) - 4.0).tolist()
        request = finished_request(ids(4), ids(length), versions=[0] * length, logprobs=logprobs)
        request.finish_reason = "length" if length == 29 else "stop"
        requests.append(request)
    return collate_rollouts(requests, [None, *range(7)], train_version=0)


def columns_of(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(run_seed() + 1)
    shape = batch.tokens_BT.shape
    advantages_B1 = torch.randn(len(batch), 1, generator=generator)
    reference_BT = -torch.rand(shape, generator=generator) - 4.0
    return {"advantages_BT": advantages_B1.expand(shape), "reference_logprobs_BT": reference_BT}


def plain_loss(policy: Any, batch: RolloutBatch, config: PolicyLossConfig) -> torch.Tensor:
    logprobs_BT, entropies_BT = token_logprobs(
        policy(batch.tokens_BT).logits, batch.tokens_BT, 0.8, return_entropy=True
    )
    columns = columns_of(batch)
    loss, _ = policy_loss(
        logprobs_BT,
        batch.behaviour_logprobs_BT,
        columns.pop("advantages_BT"),
        batch.mask_BT,
        config,
        entropies_BT=entropies_BT,
        **columns,
    )
    return loss


def gradients(policy: Any) -> list[torch.Tensor]:
    return [p.grad.clone() for p in policy.parameters() if p.grad is not None]


# How UpdateSettings lets passes go: trees of tokens, padded rows, packed rows.
WAYS = (
    {"share_prefixes": True},
    {"share_prefixes": False},
    {"share_prefixes": False, "is_packed": True},
)


@pytest.mark.drawn(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("max_tokens", [None, 33, 60])
@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo", "gspo", "sapo"])
def test_accumulate_gradients_gives_loss_and_gradient_of_the_whole_batch(
    policy: Any, kind: str, max_tokens: int | None, way: dict[str, bool]
) -> None:
    batch = random_batch().without_truncated()
    config = PolicyLossConfig(kind=kind, kl_coefficient=0.1, entropy_coefficient=0.02)
    policy.zero_grad()
    loss = plain_loss(policy, batch, config)
    loss.backward()
    expected = gradients(policy)
    policy.zero_grad()
    settings = UpdateSettings(max_tokens=max_tokens, **way, temperature=0.8)
    metrics = accumulate_gradients(policy, batch, columns_of(batch), config, settings)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    for ours, theirs in zip(gradients(policy), expected, strict=True):
        assert_close(ours, theirs, **EXACT)
    assert max(gradient.abs().max() for gradient in expected) > 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_accumulate_gradients_returns_the_metrics_of_the_whole_batch(
    policy: Any, way: dict[str, bool]
) -> None:
    batch, columns = random_batch().without_truncated(), columns_of(random_batch())
    generator = torch.Generator().manual_seed(run_seed() + 2)
    shape = batch.tokens_BT.shape
    columns["proximal_logprobs_BT"] = -torch.rand(shape, generator=generator) - 4.0
    batch = replace(
        batch,
        policy_lag_BT=torch.randint(0, 3, shape, generator=generator, dtype=torch.int32),
        kv_lag_BT=torch.rand(shape, generator=generator),
    )
    config = PolicyLossConfig(kind="dapo", kl_coefficient=0.1, max_sequence_kl=0.3)
    found = []
    for max_tokens in (None, 33):
        settings = UpdateSettings(max_tokens=max_tokens, **way)
        found.append(accumulate_gradients(policy, batch, dict(columns), config, settings))
    assert found[0].keys() == found[1].keys()
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)
    assert any(name.startswith("by_lag/policy_2-3") for name in found[0])


def test_update_policy_iterates_over_the_batch_around_the_same_log_probs(policy: Any) -> None:
    batch, config = random_batch(), PolicyLossConfig(kind="grpo", kl_coefficient=0.1)
    plain, ours = copy.deepcopy(policy), copy.deepcopy(policy)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        plain_loss(plain, batch, config).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    settings = UpdateSettings(num_iterations=3, max_tokens=60, is_packed=True, temperature=0.8)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    reports = update_policy(ours, optimizer, batch, columns_of(batch), config, settings)
    assert len(reports) == 3
    assert reports[-1]["ratio_std"] != reports[0]["ratio_std"]
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("way", WAYS)
def test_reference_log_probs_do_not_depend_on_micro_batches(
    policy: Any, way: dict[str, bool]
) -> None:
    batch, settings = random_batch(), UpdateSettings(max_tokens=40, **way)
    changed = copy.deepcopy(policy)
    reference = ReferencePolicy.copy_of(changed)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.5)
    values_BT = reference.logprobs(batch, settings)
    with torch.no_grad():
        expected_BT = token_logprobs(policy(batch.tokens_BT).logits, batch.tokens_BT)
    assert_close(values_BT[batch.mask_BT], expected_BT[batch.mask_BT], **EXACT)
    assert not values_BT.requires_grad
    own_BT = compute_logprobs(changed, batch, settings)
    assert not torch.allclose(own_BT[batch.mask_BT], values_BT[batch.mask_BT])


def test_reference_policy_without_adapter_is_the_base_model(policy: Any) -> None:
    class Adapted:
        is_on = True

        def __call__(self, **inputs: Any) -> Any:
            output = policy(**inputs)
            output.logits = output.logits * (2.0 if self.is_on else 1.0)
            return output

        @contextmanager
        def disable_adapter(self) -> Any:
            self.is_on = False
            yield
            self.is_on = True

    batch, adapted = random_batch(), Adapted()
    values_BT = ReferencePolicy.without_adapter(adapted).logprobs(batch, UpdateSettings())
    assert_close(values_BT, compute_logprobs(policy, batch, UpdateSettings()))
    assert adapted.is_on


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    room=st.integers(0, 60),
    is_packed=st.booleans(),
)
def test_split_micro_batches_puts_each_row_into_one_part_within_max_tokens(
    lengths: list[int], room: int, is_packed: bool
) -> None:
    max_tokens = max(lengths) + room
    parts = split_micro_batches(torch.tensor(lengths), max_tokens, is_packed)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    for part in parts:
        own = [lengths[row] for row in part.tolist()]
        assert (sum(own) if is_packed else len(own) * max(own)) <= max_tokens


def test_split_micro_batches_refuses_a_rollout_longer_than_max_tokens() -> None:
    with pytest.raises(ConfigError, match="max_tokens=8 is less than the 9 tokens of a rollout"):
        split_micro_batches(torch.tensor([3, 9]), 8)


@pytest.mark.parametrize("way", WAYS)
def test_split_micro_batches_leaves_out_rollouts_without_a_turn(
    policy: Any, way: dict[str, bool]
) -> None:
    failed = Rollout([], failure="step_timeout")
    turn = finished_request([1, 2], [3, 4, 5], versions=[0] * 3, logprobs=[-4.0] * 3)
    batch = collate_rollouts([failed, turn, failed], [None, 1.0, None], train_version=0)
    settings = UpdateSettings(max_tokens=5, **way)
    logprobs_BT = compute_logprobs(policy, batch, settings)
    assert (logprobs_BT != 0.0).sum(dim=1).tolist() == [0, 3, 0]


@pytest.mark.parametrize(("num_parts", "sizes"), [(4, [2, 2, 1, 1]), (6, [1] * 6), (9, [1] * 6)])
def test_split_rollouts_makes_as_many_parts_as_it_is_asked_for(
    num_parts: int, sizes: list[int]
) -> None:
    parts = random_batch().without_truncated().split_rollouts(num_parts)
    assert [len(part) for part in parts] == sizes


def test_split_rollouts_leaves_out_rollouts_without_a_trained_token(policy: Any) -> None:
    """Without a gradient, a step would only follow the optimizer's momentum."""
    batch = random_batch().without_truncated()  # the first failed, the last was cut
    parts = batch.split_rollouts(3)
    assert sorted(torch.cat(parts).tolist()) == [1, 2, 3, 4, 5, 6]
    assert [len(rows) for rows in parts] == [2, 2, 2]
    nothing = replace(batch, mask_BT=torch.zeros_like(batch.mask_BT))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    config, settings = PolicyLossConfig(kind="dapo"), UpdateSettings()
    assert update_policy(policy, optimizer, nothing, columns_of(batch), config, settings) == []


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=24),
    num_ranks=st.integers(1, 5),
    max_tokens=st.one_of(st.none(), st.integers(20, 60)),
    is_packed=st.booleans(),
)
def test_split_among_ranks_divides_all_rows_into_equal_numbers_of_passes(
    lengths: list[int], num_ranks: int, max_tokens: int | None, is_packed: bool
) -> None:
    settings = UpdateSettings(max_tokens=max_tokens, is_packed=is_packed)
    passes = split_among_ranks(torch.tensor(lengths), settings, num_ranks)
    assert len(passes) == num_ranks
    assert len({len(own) for own in passes}) == 1
    rows = [row for own in passes for part in own for row in part.tolist()]
    assert sorted(rows) == [row for row, length in enumerate(lengths) if length]
    loads = [sum(lengths[row] for part in own for row in part.tolist()) for own in passes]
    assert max(loads) - min(loads) <= max(lengths)
    for own in passes:
        filled = [len(part) > 0 for part in own]
        assert filled == sorted(filled, reverse=True), "passes without a row come last"
