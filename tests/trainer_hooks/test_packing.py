"""is_packed: models that let packed rollouts attend to each other are refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.errors import ConfigError
from tests.tiny_models import randomize, tiny_model
from tests.trainer_hooks.test_micro_batches import columns_of, random_batch
from trainer_hooks import PolicyLossConfig, UpdateSettings, accumulate_gradients, update_policy
from trainer_hooks.update.micro_batches import compute_logprobs
from trainer_hooks.update.packing import require_separate_rollouts

PACKED = UpdateSettings(is_packed=True, share_prefixes=False)
PADDED = UpdateSettings(share_prefixes=False)


def gpt_oss() -> Any:
    return tiny_model("gpt_oss", std=0.5).train()


def test_is_packed_refuses_gpt_oss_which_is_accepted_padded() -> None:
    policy, batch = gpt_oss(), random_batch()
    with pytest.raises(ConfigError, match=r"is_packed=True with GptOssForCausalLM .*is_packed=F"):
        compute_logprobs(policy, batch, PACKED)
    with pytest.raises(ConfigError, match=r"is_packed=True with GptOssForCausalLM"):
        accumulate_gradients(policy, batch, columns_of(batch), PolicyLossConfig(), PACKED)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    before = copy.deepcopy(policy.state_dict())
    with pytest.raises(ConfigError, match=r"is_packed=True with GptOssForCausalLM"):
        update_policy(policy, optimizer, batch, columns_of(batch), PolicyLossConfig(), PACKED)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert compute_logprobs(policy, batch, PADDED).isfinite().all()


@pytest.mark.parametrize("family", ["opt", "bloom", "mpt"])
def test_is_packed_refuses_families_whose_mask_ignores_position_ids(family: str) -> None:
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        ffn_dim=48, word_embed_proj_dim=32,
    )  # fmt: skip
    policy = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomize(policy, seed=0, std=0.2)
    with pytest.raises(ConfigError, match=r"is_packed=True with .*beside two different ones"):
        require_separate_rollouts(policy, torch.device("cpu"))


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_packed_accepts_models_that_separate_rollouts(
    family: str, attention: str, dtype: torch.dtype
) -> None:
    policy, batch = tiny_model(family, std=0.2).to(dtype).train(), random_batch()
    policy.set_attn_implementation(attention)
    packed, padded = (compute_logprobs(policy, batch, how) for how in (PACKED, PADDED))
    assert policy.training
    wide = 1e-4 if dtype is torch.float32 else 2.0
    assert torch.allclose(packed[batch.mask_BT], padded[batch.mask_BT], atol=wide)


def test_is_packed_checks_each_model_once() -> None:
    policy, batch, calls = tiny_model("qwen3", std=0.2), random_batch(), []
    policy.register_forward_hook(lambda *_: calls.append(1))
    compute_logprobs(policy, batch, PACKED)
    num_first = len(calls)
    compute_logprobs(policy, batch, PACKED)
    assert len(calls) - num_first == num_first - 3


def test_is_packed_refuses_a_function_that_mixes_rollouts() -> None:
    def mixes(input_ids: torch.Tensor, position_ids: Any = None, **rest: Any) -> Any:
        return SimpleNamespace(logits=input_ids.cumsum(1)[..., None] * torch.linspace(0, 1, 64))

    with pytest.raises(ConfigError, match=r"is_packed=True with function .*attend to each other"):
        compute_logprobs(mixes, random_batch(), PACKED)
