"""replay_routing: routers of live transformers models choose the recorded experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from rollout.errors import ConfigError
from tests.tiny_mixtures import (
    MIXTURES,
    NUM_EXPERTS,
    TOP_K,
    checkpoint_activations,
    own_routing,
    perturb_routers,
    routing_of,
    tiny_mixture,
)
from tests.tiny_models import tiny_model
from trainer_hooks.losses.replay_routing import find_routers, replay_routing

TOKENS_BT = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def other_routing(model: Any) -> torch.Tensor:
    """Return distinct ids that differ everywhere from the routers' own choices."""
    return (own_routing(model, TOKENS_BT) + 1) % NUM_EXPERTS


@pytest.mark.parametrize("family", MIXTURES)
def test_replay_routing_of_a_models_own_choice_changes_nothing(family: str) -> None:
    model = tiny_mixture(family)
    with torch.no_grad():
        expected = model(input_ids=TOKENS_BT).logits
        with replay_routing(model, own_routing(model, TOKENS_BT)):
            replayed = model(input_ids=TOKENS_BT).logits
    # Where a router leaves its choice unsorted, experts may be summed in another order.
    torch.testing.assert_close(replayed, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", MIXTURES)
def test_replay_routing_computes_with_the_experts_of_another_model(family: str) -> None:
    """Only the choice differs: with it replayed, equal scores give equal weights."""
    model, other = tiny_mixture(family), tiny_mixture(family)
    wanted = other_routing(model)
    with routing_of(model) as chosen, replay_routing(model, wanted):
        logits = model(input_ids=TOKENS_BT).logits
    assert torch.equal(torch.stack(chosen, dim=1).view_as(wanted).to(torch.int16), wanted)
    logits.square().mean().backward()
    weighed = [router.weight.grad for router in find_routers(model)]
    assert all(bool((gradient != 0).any()) for gradient in weighed), "scores have a gradient"
    with torch.no_grad():
        assert not torch.allclose(other(input_ids=TOKENS_BT).logits, logits, atol=1e-2)
        # Afterwards the routers are the model's own again.
        torch.testing.assert_close(
            model(input_ids=TOKENS_BT).logits, other(input_ids=TOKENS_BT).logits
        )


def test_replay_routing_weighs_experts_by_the_routers_own_scores() -> None:
    model = tiny_mixture("glm4_moe")
    (router,) = find_routers(model)
    x_NE = torch.randn(4, 48, generator=torch.Generator().manual_seed(1))
    routing = torch.tensor([[0, 7], [5, 2], [1, 3], [6, 4]])
    with replay_routing(model, routing.view(1, 4, 1, 2)):
        _, weights, ids = router(x_NE)
    scores_NE = (x_NE @ router.weight.T).sigmoid()
    chosen = scores_NE.gather(1, routing)
    torch.testing.assert_close(weights, chosen / chosen.sum(1, keepdim=True) * 1.5)
    assert torch.equal(ids, routing)


def test_replay_routing_leaves_unknown_rows_to_the_router() -> None:
    model = tiny_mixture()
    own, routing = own_routing(model, TOKENS_BT), other_routing(model)
    routing[0, 0] = -1  # the first layer's input does not depend on the routing
    routing[1, 3, 1] = -1
    with torch.no_grad(), routing_of(model) as chosen, replay_routing(model, routing):
        model(input_ids=TOKENS_BT)
    chosen_BTLK = torch.stack(chosen, dim=1).view_as(routing).to(torch.int16)
    assert torch.equal(chosen_BTLK[0, 0, 0], own[0, 0, 0])
    is_replayed = routing >= 0
    assert torch.equal(chosen_BTLK[is_replayed], routing[is_replayed])
    assert bool((chosen_BTLK >= 0).all())


def test_replay_routing_of_a_packed_batch_equals_the_padded_batch() -> None:
    model = tiny_mixture()
    routing = other_routing(model)
    positions_1N = torch.arange(6).repeat(2)[None]
    with torch.no_grad():
        with replay_routing(model, routing):
            padded = model(input_ids=TOKENS_BT).logits
        with replay_routing(model, routing.flatten(0, 1)[None]):
            packed = model(
                input_ids=TOKENS_BT.view(1, -1), position_ids=positions_1N, use_cache=False
            ).logits
    torch.testing.assert_close(packed.view_as(padded), padded, rtol=1e-4, atol=1e-4)


def gradients(model: Any, routing: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    with replay_routing(model, routing):
        model(input_ids=TOKENS_BT, use_cache=False).logits.square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_replay_routing_with_gradient_checkpointing_replays_repeated_layers(
    use_reentrant: bool,
) -> None:
    model = tiny_mixture().train()
    routing = other_routing(model)
    expected = gradients(model, routing)
    model.enable_input_require_grads()
    checkpoint_activations(model, use_reentrant=use_reentrant)
    with routing_of(model) as chosen:
        given = gradients(model, routing)
    assert len(chosen) == 2 * len(find_routers(model)), "each layer ran twice"
    for gradient, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_replay_routing_refuses_a_checkpointed_backward_pass_outside_the_block() -> None:
    model = tiny_mixture().train()
    checkpoint_activations(model, use_reentrant=False)
    # Replaying the model's own routing leaves no other difference to detect.
    with replay_routing(model, own_routing(model, TOKENS_BT)):
        loss = model(input_ids=TOKENS_BT, use_cache=False).logits.square().mean()
    with pytest.raises(CheckpointError, match="forward and recomputation"):
        loss.backward()


def test_replay_routing_allows_a_plain_backward_pass_outside_the_block() -> None:
    model = tiny_mixture().train()
    routing = other_routing(model)
    expected = gradients(model, routing)
    model.zero_grad()
    with replay_routing(model, routing):
        loss = model(input_ids=TOKENS_BT, use_cache=False).logits.square().mean()
    loss.backward()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)


# ---- refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[..., :1], r"\[2, 6, 2, 1\] must be \[rows, positions, 2, 2\]"),
        (lambda rows: rows[:, :, :1], r"\[2, 6, 1, 2\] must be \[rows, positions, 2, 2\]"),
        (lambda rows: rows[0], r"\[6, 2, 2\] must be \[rows, positions, 2, 2\]"),
        (lambda rows: rows[:, :-1], r"10 tokens, and the forward pass of Qwen3MoeTopKRouter 12"),
        (lambda rows: rows + NUM_EXPERTS, r"names expert \d+ in layer 0 .* which has 8"),
        (lambda rows: rows * 0, r"names an expert twice .* -1, not zeros"),
    ],
    ids=["experts", "layers", "dimensions", "tokens", "unknown expert", "duplicates"],
)
def test_replay_routing_refuses_misshaped_rows_and_leaves_the_model(
    change: Any, message: str
) -> None:
    model = tiny_mixture()
    expected = model(input_ids=TOKENS_BT).logits
    with (
        pytest.raises(ConfigError, match=message),
        replay_routing(model, change(own_routing(model, TOKENS_BT))),
    ):
        model(input_ids=TOKENS_BT)
    assert torch.equal(model(input_ids=TOKENS_BT).logits, expected)


def test_replay_routing_refuses_a_dense_model() -> None:
    with (
        pytest.raises(ConfigError, match=r"Qwen3ForCausalLM has no \.\.\.TopKRouter"),
        replay_routing(tiny_model(), torch.zeros(1, 1, 1, 1)),
    ):
        pass


class GateOfTheirs(nn.Module):
    """A router among 4 experts, with a name and a method that replay_routing does not know."""

    def __init__(self, *, is_greedy: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.top_k, self.num_experts, self.is_greedy = 1, 4, is_greedy

    def forward(self, x_NE: torch.Tensor) -> Any:
        if self.is_greedy:
            return x_NE, x_NE, x_NE.argmax(dim=-1, keepdim=True)
        weights, ids = (x_NE @ self.weight).topk(self.top_k)
        return x_NE, weights, ids


class BlockExperts(nn.Module):
    """Experts of a layer, named as in transformers."""


class Block(nn.Module):
    """A layer with a router that replay_routing does not know."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = gate, BlockExperts()


def test_replay_routing_names_an_unknown_router() -> None:
    with pytest.raises(ConfigError, match=r"Block has no router .*GateOfTheirs.*routers="):
        find_routers(Block(GateOfTheirs()))


def test_replay_routing_accepts_given_routers_that_choose_by_topk() -> None:
    gate, x_NE = GateOfTheirs(), torch.arange(8.0).view(2, 4)
    with replay_routing(Block(gate), torch.tensor([1, -1]).view(1, 2, 1, 1), routers=[gate]):
        _, weights, ids = gate(x_NE)
    assert ids.flatten().tolist() == [1, 3]
    assert weights.flatten().tolist() == [1.0, 7.0]
    greedy = GateOfTheirs(is_greedy=True)
    with (
        pytest.raises(ConfigError, match=r"GateOfTheirs called torch\.topk 0 times"),
        replay_routing(Block(greedy), torch.zeros(1, 2, 1, 1), routers=[greedy]),
    ):
        greedy(x_NE)


def test_replay_routing_refuses_a_block_without_a_forward_pass() -> None:
    model = tiny_mixture()
    with (
        pytest.raises(ConfigError, match=r"2 of 2 routers \(Qwen3MoeTopKRouter\) were not called"),
        replay_routing(model, own_routing(model, TOKENS_BT)),
    ):
        pass


def test_replay_routing_restores_the_routers_after_an_error() -> None:
    model = tiny_mixture()
    routing = own_routing(model, TOKENS_BT)
    with pytest.raises(KeyError), replay_routing(model, routing):
        raise KeyError
    assert not any("forward" in vars(router) for router in find_routers(model))
    perturb_routers(model, 1.0)
    assert not torch.equal(own_routing(model, TOKENS_BT), routing)
    assert routing.shape == (*TOKENS_BT.shape, 2, TOP_K)
