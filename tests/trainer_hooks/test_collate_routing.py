"""routing_BTLK of collate_rollouts: the experts of rollouts, beside their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout.errors import ConfigError
from rollout.requests import DynamicInferenceRequest, Status
from tests.tiny_mixtures import checkpoint_activations, own_routing, tiny_mixture
from tests.trainer_hooks.fakes import finished_request
from trainer_hooks import (
    PolicyLossConfig,
    ReferencePolicy,
    Rollout,
    RolloutBatch,
    UpdateSettings,
    accumulate_gradients,
    collate_rollouts,
    compute_logprobs,
)

NUM_LAYERS, TOP_K = 2, 2


def rows(*ids: int) -> torch.Tensor:
    """Return one row per id, which is the first choice of both layers."""
    return torch.tensor([[[i, i + 1]] * NUM_LAYERS for i in ids], dtype=torch.int16)


def request_of(
    prompt: list[int], generated: list[int], ids: list[int] | None, **fields: Any
) -> DynamicInferenceRequest:
    request = finished_request(prompt, generated, versions=[0] * len(generated), **fields)
    request.routing_indices = None if ids is None else rows(*ids)
    return request


def first_ids(batch: RolloutBatch) -> list[list[int]]:
    assert batch.routing_BTLK is not None
    assert batch.routing_BTLK.dtype == torch.int16
    assert batch.routing_BTLK.shape == (*batch.tokens_BT.shape, NUM_LAYERS, TOP_K)
    unknown = (batch.routing_BTLK < 0).flatten(2)
    assert torch.equal(unknown.any(dim=2), unknown.all(dim=2))
    return batch.routing_BTLK[:, :, 0, 0].tolist()


def test_routing_rows_stand_at_their_tokens_and_padding_is_unknown() -> None:
    requests = [request_of([10, 11], [20, 21], [1, 2, 3]), request_of([12], [22], [4])]
    batch = collate_rollouts(requests, [1.0, 0.0], 0, routing=True)
    assert first_ids(batch) == [[1, 2, 3, -1], [4, -1, -1, -1]]
    assert first_ids(batch.select(torch.tensor([1]))) == [[4, -1]]
    assert collate_rollouts(requests, [1.0, 0.0], 0).routing_BTLK is None


def test_routing_of_a_later_turn_starts_at_the_last_token_of_the_previous_turn() -> None:
    """Experts recorded by a turn are kept, also if the next turn computed its tokens with
    others.
    """
    first = request_of([1, 2], [3, 4], [10, 11, 12])
    second = request_of([1, 2, 3, 4, 5], [6], [50, 51, 52, 53, 54])
    batch = collate_rollouts([Rollout([first, second])], [1.0], 0, routing=True)
    assert first_ids(batch) == [[10, 11, 12, 53, 54, -1]]


def test_each_token_sequence_of_a_rollout_has_its_own_routing() -> None:
    first, second = request_of([1, 2], [3], [10, 11]), request_of([7], [8, 9], [20, 21])
    rollout = Rollout([first, second], sequence_starts=[0, 1])
    batch = collate_rollouts([rollout], [1.0], 0, routing=True)
    assert first_ids(batch) == [[10, 11, -1], [20, 21, -1]]


def test_collate_rollouts_refuses_trained_rollouts_without_routing() -> None:
    good = request_of([1, 2], [3], [10, 11])
    cut = request_of([1, 2], [], None, status=Status.FAILED, logprobs=[])
    batch = collate_rollouts([good, cut], [1.0, 0.0], 0, routing=True)
    assert first_ids(batch) == [[10, 11, -1], [-1, -1, -1]]
    with pytest.raises(ConfigError, match=r"has no routing_indices.*record_routing=True"):
        collate_rollouts([good, request_of([1], [2], None)], [1.0, 0.0], 0, routing=True)
    assert collate_rollouts([cut], [0.0], 0, routing=True).routing_BTLK is None


def test_rollout_without_turns_needs_no_routing() -> None:
    good, unrun = request_of([1, 2], [3], [10, 11]), request_of([1], [], None, logprobs=[])
    batch = collate_rollouts([good, unrun], [1.0, 0.0], 0, routing=True)
    assert first_ids(batch) == [[10, 11, -1], [-1, -1, -1]]


def test_collate_rollouts_refuses_routing_of_two_models() -> None:
    other = request_of([1], [2], [3])
    other.routing_indices = torch.zeros(1, 3, TOP_K, dtype=torch.int16)
    with pytest.raises(ConfigError, match=r"several shapes, \[\(2, 2\), \(3, 2\)\]"):
        collate_rollouts([request_of([1], [2], [3]), other], [1.0, 0.0], 0, routing=True)


# ---- the update


def batch_of(model: Any, shift: int) -> RolloutBatch:
    """Return rollouts of unequal lengths with the model's own experts, each shifted by `shift`."""
    requests = []
    for length in (2, 5, 9):
        tokens = torch.arange(3, 3 + length + 2)
        request = finished_request(tokens[:2].tolist(), tokens[2:].tolist(), versions=[0] * length)
        request.routing_indices = (own_routing(model, tokens[None])[0, :-1] + shift) % 8
        requests.append(request)
    return collate_rollouts(requests, [1.0, 0.0, 0.5], 0, routing=True)


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_compute_logprobs_uses_the_recorded_experts(is_packed: bool) -> None:
    model = tiny_mixture()
    settings = UpdateSettings(max_tokens=14, is_packed=is_packed, replay_routing=True)
    plain = UpdateSettings()
    own, other = batch_of(model, 0), batch_of(model, 1)

    def logprobs(batch: RolloutBatch, how: UpdateSettings) -> torch.Tensor:
        return compute_logprobs(model, batch, how)[batch.mask_BT]

    torch.testing.assert_close(logprobs(own, settings), logprobs(own, plain), rtol=0, atol=1e-4)
    whole = UpdateSettings(replay_routing=True)
    expected = logprobs(other, whole)
    assert (expected - logprobs(other, plain)).abs().max() > 0.1
    torch.testing.assert_close(logprobs(other, settings), expected, rtol=0, atol=1e-4)


def test_reference_policy_does_not_replay_routing() -> None:
    model = tiny_mixture()
    batch, settings = batch_of(model, 1), UpdateSettings(replay_routing=True)
    logprobs_BT = ReferencePolicy.copy_of(model).logprobs(batch, settings)
    assert torch.equal(logprobs_BT, compute_logprobs(model, batch, UpdateSettings()))


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "layers run again"])
def test_accumulate_gradients_uses_the_recorded_experts(is_checkpointed: bool) -> None:
    model = tiny_mixture().train()
    batch, config = batch_of(model, 1), PolicyLossConfig(kind="grpo")
    columns = {"advantages_BT": torch.ones(batch.tokens_BT.shape)}

    def gradient_of(settings: UpdateSettings) -> torch.Tensor:
        model.zero_grad()
        accumulate_gradients(model, batch, columns, config, settings)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    expected = gradient_of(UpdateSettings(replay_routing=True))
    assert not torch.allclose(expected, gradient_of(UpdateSettings()), atol=1e-3)
    if is_checkpointed:
        checkpoint_activations(model, use_reentrant=False)
    cut = UpdateSettings(max_tokens=14, is_packed=True, replay_routing=True)
    torch.testing.assert_close(gradient_of(cut), expected, rtol=1e-3, atol=1e-4)


def test_replay_routing_without_routing_or_a_module_is_refused() -> None:
    model, settings = tiny_mixture(), UpdateSettings(replay_routing=True)
    without = collate_rollouts([request_of([1], [2], None)], [1.0], 0)
    with pytest.raises(ConfigError, match="routing=True for collate_rollouts"):
        compute_logprobs(model, without, settings)
    with pytest.raises(ConfigError, match="as the policy, not a function"):
        compute_logprobs(lambda **given: model(**given), batch_of(model, 0), settings)


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_replay_routing_of_a_batch_without_any_turn_does_nothing(
    is_packed: bool,
) -> None:
    model = tiny_mixture()
    cut = request_of([1, 2], [], None, status=Status.FAILED, logprobs=[])
    batch = collate_rollouts([cut, cut], [None, None], 0, routing=True)
    settings = UpdateSettings(is_packed=is_packed, replay_routing=True)
    plain = UpdateSettings(is_packed=is_packed)
    assert torch.equal(
        compute_logprobs(model, batch, settings), compute_logprobs(model, batch, plain)
    )
    columns = {"advantages_BT": torch.zeros(batch.tokens_BT.shape)}
    metrics = accumulate_gradients(model, batch, columns, PolicyLossConfig(kind="grpo"), settings)
    assert metrics["loss"] == 0.0
