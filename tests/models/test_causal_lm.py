"""CausalLM's weights by name: slots, ties, refresh and random initialisation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from rollout.errors import ModelError
from rollout.models import CausalLM, ModelSpec, build_model
from tests.family_cases import FAMILY_CASES
from tests.models.hf_models import PROMPT, hf_config, hf_logits, hf_model
from tests.models.oracle_backend import logits_of, make_batch, make_cache
from tests.tiny_models import tiny_config


def spec_of(family: str = "qwen3", **changes: object) -> ModelSpec:
    return ModelSpec.from_hf_config(hf_config(family, **changes).to_dict())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weight_slots_have_the_names_and_values_of_transformers(family: str) -> None:
    reference = hf_model(family, tie_word_embeddings=False)
    weights = build_model(reference).read_weights()
    assert weights.keys() == reference.state_dict().keys()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(weights[name], tensor), name


def test_weight_slots_have_tied_weights_under_both_names() -> None:
    slots = CausalLM.random(spec_of(tie_word_embeddings=True)).weight_slots()
    head, embedding = slots["lm_head.weight"], slots["model.embed_tokens.weight"]
    assert head.address == embedding.address
    assert head.shape == embedding.shape


@pytest.mark.parametrize("is_tied", [False, True])
def test_refresh_serves_weights_written_to_slots(is_tied: bool) -> None:
    model = CausalLM.random(spec_of("qwen2", tie_word_embeddings=is_tied), seed=1)
    before_TV = logits_of(model, PROMPT)
    reference = hf_model("qwen2", tie_word_embeddings=is_tied)
    addresses = {name: slot.address for name, slot in model.weight_slots().items()}
    for name, tensor in reference.state_dict().items():
        model.weight_slots()[name].write(tensor)
    model.refresh()
    assert {name: slot.address for name, slot in model.weight_slots().items()} == addresses
    after_TV = logits_of(model, PROMPT)
    assert not torch.allclose(after_TV, before_TV)
    assert_close(after_TV, hf_logits(reference, PROMPT), rtol=1e-4, atol=1e-4)


def test_causal_lm_has_no_gradients_and_no_tables_in_its_state_dict() -> None:
    model = CausalLM.random(spec_of())
    model.reserve_positions(8)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any("rotary" in name for name in model.state_dict())


def test_forward_of_an_unprepared_model_is_refused() -> None:
    model = CausalLM.random(spec_of())
    with pytest.raises(ModelError, match="prepare"):
        model(make_batch(make_cache(model, 1), [(0, PROMPT)]))
    with pytest.raises(ModelError, match="prepare"):
        model.refresh()


def test_random_follows_its_seed_alone() -> None:
    torch.manual_seed(1)
    first = CausalLM.random(spec_of(), seed=5).read_weights()
    torch.manual_seed(2)
    again = CausalLM.random(spec_of(), seed=5).read_weights()
    other = CausalLM.random(spec_of(), seed=6).read_weights()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_random_weights_have_the_documented_deviation() -> None:
    weights = CausalLM.random(spec_of("qwen2"), dtype=torch.bfloat16).read_weights()
    assert weights["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert weights["model.embed_tokens.weight"].float().std().item() == pytest.approx(0.02, rel=0.1)
    assert (weights["model.layers.0.input_layernorm.weight"] == 1).all()
    assert (weights["model.layers.1.self_attn.q_proj.bias"] == 0).all()


def test_random_experts_have_the_documented_deviation_and_no_bias() -> None:
    for family in ("gpt_oss", "minimax_m2"):
        config = tiny_config(family, **FAMILY_CASES[family])
        model = CausalLM.random(ModelSpec.from_hf_config(config.to_dict()))
        for name, values in (model.state_dict()).items():
            if name.endswith(("bias", "sinks")):
                assert (values == 0).all(), name
            elif "experts" in name:
                assert values.std().item() == pytest.approx(0.02, rel=0.1), name


def test_cache_spec_describes_the_kv_cache() -> None:
    cache = CausalLM.random(replace(spec_of(), dtype=torch.bfloat16)).cache_spec(16)
    assert (cache.num_layers, cache.num_kv_heads, cache.head_dim) == (2, 2, 8)
    assert (cache.block_size, cache.dtype) == (16, torch.bfloat16)
