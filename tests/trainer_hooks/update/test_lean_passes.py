"""gradient_checkpointing, autocast, embeddings_in_place: gradients equal those of plain passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from rollout.errors import ConfigError
from tests.tiny_models import randomize, tiny_model
from tests.trainer_hooks.test_micro_batches import columns_of, random_batch
from tests.trainer_hooks.train.grpo_settings import tiny_settings
from trainer_hooks import PolicyLossConfig, UpdateSettings, accumulate_gradients, compute_logprobs
from trainer_hooks.train.learner import Learner
from trainer_hooks.update.lean_passes import checkpointed_layers, embeddings_in_place

WAYS: dict[str, dict[str, Any]] = {
    "trees": {},
    "packed": {"share_prefixes": False, "is_packed": True},
    "padded": {"share_prefixes": False},
}


def gradients(policy: Any, **settings: Any) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    batch = random_batch()
    columns = {"advantages_BT": columns_of(batch)["advantages_BT"]}
    # Without a clip, which a rounded ratio may cross.
    loss = PolicyLossConfig(kind="dapo", epsilon_low=0.99, epsilon_high=1e6)
    accumulate_gradients(policy, batch, columns, loss, UpdateSettings(**settings))
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


@contextmanager
def counted_calls(policy: Any) -> Iterator[list[str]]:
    """List the calls of the first layer's attention within the block."""
    calls: list[str] = []
    name = next(name for name, _ in policy.named_modules() if name.endswith("layers.0.self_attn"))
    handle = policy.get_submodule(name).register_forward_hook(lambda *_: calls.append(name))
    try:
        yield calls
    finally:
        handle.remove()


def assert_checkpointing_changes_no_gradient(policy: Any, **settings: Any) -> None:
    """Also assert that each layer is computed twice."""
    gradients(policy, **settings)  # checks the model by passes of its own
    with counted_calls(policy) as calls:
        plain = gradients(policy, **settings)
    num_passes = len(calls)
    with counted_calls(policy) as calls:
        again = gradients(policy, **settings, gradient_checkpointing=True)
    assert len(calls) == 2 * num_passes > 0
    assert again.keys() == plain.keys()
    assert plain
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    assert not any("forward" in vars(module) for module in policy.modules())


@pytest.mark.parametrize("way", WAYS)
def test_gradient_checkpointing_computes_layers_again_and_the_same_gradients(way: str) -> None:
    policy = tiny_model("qwen3", std=0.2).eval()
    assert_checkpointing_changes_no_gradient(policy, **WAYS[way])


def test_gradient_checkpointing_trains_an_adapter() -> None:
    base = tiny_model("llama", std=0.2)
    policy: Any = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    randomize(policy, seed=1, std=0.1)
    assert_checkpointing_changes_no_gradient(policy)


def test_gradient_checkpointing_keeps_dropout_off_in_eval_mode() -> None:
    policy = tiny_model("opt", std=0.2, dropout=0.5).eval()
    plain, again = gradients(policy), gradients(policy, gradient_checkpointing=True)
    assert all(torch.equal(again[name], plain[name]) for name in plain)


class Block(GradientCheckpointingLayer):
    """A layer around another one, as in Zamba."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.product = inner, torch.nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.product(self.inner(hidden)).tanh()  # type: ignore[no-any-return]


def test_checkpointed_layers_may_hold_layers() -> None:
    policy = torch.nn.Sequential(Block(Block(torch.nn.Identity())), Block(torch.nn.Identity()))
    hidden = torch.randn(3, 4)
    policy(hidden).sum().backward()
    plain = [weight.grad for weight in policy.parameters()]
    policy.zero_grad()
    with checkpointed_layers(policy):
        total = policy(hidden).sum()
    total.backward()
    torch.testing.assert_close([weight.grad for weight in policy.parameters()], plain)


def test_gradient_checkpointing_refuses_models_without_layers_of_transformers() -> None:
    batch = random_batch()
    with pytest.raises(ConfigError, match="gradient_checkpointing=True with Linear"):
        compute_logprobs(torch.nn.Linear(2, 2), batch, UpdateSettings(gradient_checkpointing=True))


def test_autocast_computes_in_bfloat16_and_keeps_gradients_in_float32() -> None:
    policy = tiny_model("llama", std=0.2)
    plain, seen = gradients(policy), []
    layer = policy.model.layers[0].mlp.down_proj
    handle = layer.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    cast = gradients(policy, autocast="bfloat16")
    handle.remove()
    assert set(seen) == {torch.bfloat16}
    assert all(gradient.dtype is torch.float32 for gradient in cast.values())
    ours, exact = (torch.cat([g.flatten() for g in each.values()]) for each in (cast, plain))
    assert 0.0 < (ours - exact).norm() < 0.1 * exact.norm()


def test_learner_update_checkpoints_and_casts_as_the_trainer_settings_say() -> None:
    policy, num_calls = tiny_model("qwen3", std=0.2), []
    for own in ({}, {"trainer__gradient_checkpointing": True, "trainer__autocast": "bfloat16"}):
        settings = tiny_settings(algorithm__group_size=4, algorithm__num_minibatches=1, **own)
        learner, dtypes = Learner(policy, settings.algorithm, settings.trainer), []
        learner.update(random_batch(), step=1)  # checks the model by passes of its own
        layer = policy.model.layers[0].self_attn.q_proj
        handle = layer.register_forward_hook(lambda *args, to=dtypes: to.append(args[2].dtype))
        learner.update(random_batch(), step=2)
        handle.remove()
        assert set(dtypes) == {torch.bfloat16 if own else torch.float32}
        num_calls.append(len(dtypes))
    assert num_calls[1] == 2 * num_calls[0]


def looked_up(embedding: torch.nn.Embedding, in_place: bool) -> torch.Tensor:
    tokens = torch.tensor([[1, 1, 2], [0, 5, 2]])
    weights = torch.linspace(-1, 1, 2 * 3 * 4).view(2, 3, 4)
    if in_place:
        with embeddings_in_place(embedding):
            rows = embedding(tokens)
    else:
        rows = embedding(tokens)
    (rows * weights).sum().backward()
    assert embedding.weight.grad is not None
    return embedding.weight.grad


@pytest.mark.parametrize("padding_id", [None, 2])
@pytest.mark.parametrize("has_hook", [False, True])
def test_embeddings_in_place_adds_the_gradient_that_torch_adds(
    padding_id: int | None, has_hook: bool
) -> None:
    own = torch.nn.Embedding(6, 4, padding_idx=padding_id)
    other = torch.nn.Embedding(6, 4, padding_idx=padding_id)
    sums = []
    if has_hook:
        own.weight.register_hook(lambda gradient: sums.append(gradient.clone()))
    for _ in range(2):  # the second pass adds to the gradient of the first one
        found, expected = looked_up(own, in_place=True), looked_up(other, in_place=False)
        torch.testing.assert_close(found, expected)
    assert len(sums) == 2 * has_hook
    assert "forward" not in vars(own)


def test_embeddings_in_place_leaves_frozen_and_scaled_embeddings_alone() -> None:
    frozen = torch.nn.Embedding(6, 4).requires_grad_(False)
    scaled = torch.nn.Embedding(6, 4, scale_grad_by_freq=True)
    for embedding in (frozen, scaled):
        with embeddings_in_place(embedding):
            assert "forward" not in vars(embedding)
