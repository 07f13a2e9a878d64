"""Logits of every family equal those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from rollout.models import CausalLM, build_model
from tests.models.hf_models import LLAMA3_ROPE, PROMPT, YARN_ROPE, hf_logits, hf_model
from tests.models.oracle_backend import logits_of, make_batch, make_cache, oracle_backend

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 8}),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"head_dim": 16}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_theta": 500_000.0, "rope_scaling": LLAMA3_ROPE}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    ("llama", {"num_hidden_layers": 1}),
    ("qwen2", {}),
    ("qwen2", {"num_key_value_heads": 8, "tie_word_embeddings": True}),
    ("qwen2", {"num_key_value_heads": 1, "rope_theta": 1_000_000.0}),
    ("qwen2", {"rope_scaling": YARN_ROPE}),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ("qwen3", {"num_key_value_heads": 1, "attention_bias": True}),
    ("qwen3", {"num_key_value_heads": 8, "rope_scaling": YARN_ROPE}),
    ("qwen3", {"rms_norm_eps": 0.1}),
]


@pytest.fixture(scope="module")
def qwen3() -> CausalLM:
    model = build_model(hf_model("qwen3"))
    model.prepare(oracle_backend())
    return model


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_logits_equal_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    reference = hf_model(family, **changes)
    logits_TV = logits_of(build_model(reference), PROMPT)
    assert_close(logits_TV, hf_logits(reference, PROMPT), rtol=1e-4, atol=1e-4)


def test_bfloat16_logits_are_float32_and_close_to_those_of_transformers() -> None:
    reference = hf_model("qwen2").to(torch.bfloat16)
    logits_TV = logits_of(build_model(reference), PROMPT)
    expected_TV = hf_logits(reference, PROMPT)
    assert logits_TV.dtype == torch.float32
    # bfloat16 has 8 bits of mantissa; two layers of it are compared by their mean error.
    assert (logits_TV - expected_TV).abs().mean() < 0.02 * expected_TV.abs().mean()


def test_forward_grows_rotary_tables_for_longer_sequences() -> None:
    reference = hf_model("llama")
    model, long_prompt = build_model(reference), PROMPT * 3
    logits_of(model, PROMPT)
    logits_TV = logits_of(model, long_prompt)
    assert_close(logits_TV, hf_logits(reference, long_prompt), rtol=1e-4, atol=1e-4)


def test_forward_token_by_token_equals_one_prefill(qwen3: CausalLM) -> None:
    expected_TV = logits_of(qwen3, PROMPT)
    kv = make_cache(qwen3, 1)
    steps = [(0, PROMPT[:30]), *((p, PROMPT[p : p + 1]) for p in range(30, len(PROMPT)))]
    logits = [qwen3.compute_logits(qwen3(make_batch(kv, [step]))) for step in steps]
    assert_close(torch.cat(logits), expected_TV, rtol=1e-4, atol=1e-4)


def test_forward_keeps_sequences_of_a_batch_apart(qwen3: CausalLM) -> None:
    first, second = PROMPT[:9], PROMPT[20:34]
    batch = make_batch(make_cache(qwen3, 2), [(0, first), (0, second)])
    logits_TV = qwen3.compute_logits(qwen3(batch))
    expected_TV = torch.cat((logits_of(qwen3, first), logits_of(qwen3, second)))
    assert_close(logits_TV, expected_TV, rtol=1e-4, atol=1e-4)


def test_forward_returns_hidden_states_of_logit_indices_in_order(qwen3: CausalLM) -> None:
    kv = make_cache(qwen3, 1)
    every_TE = qwen3(make_batch(kv, [(0, PROMPT)]))
    wanted_LE = qwen3(make_batch(kv, [(0, PROMPT)], wanted=[39, 3, 3]))
    assert_close(wanted_LE, every_TE[[39, 3, 3]], rtol=1e-5, atol=1e-5)


def test_forward_without_logit_indices_fills_the_cache(qwen3: CausalLM) -> None:
    kv = make_cache(qwen3, 1)
    assert qwen3(make_batch(kv, [(0, PROMPT[:30])], wanted=[])).shape == (0, 64)
    rest_TE = qwen3(make_batch(kv, [(30, PROMPT[30:])]))
    expected_TV = logits_of(qwen3, PROMPT)[30:]
    assert_close(qwen3.compute_logits(rest_TE), expected_TV, rtol=1e-4, atol=1e-4)
