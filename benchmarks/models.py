"""Shapes of the benchmarked models, and transformers models with random weights.

Used by `benchmarks.generate`, `benchmarks.moe`, `benchmarks.loading`, `benchmarks.products`,
`benchmarks.suspend_resume`, `benchmarks.tensor_parallel`, `benchmarks.peers` and
`benchmarks.peers_models`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers

from benchmarks.gpu_shapes import layer_matrix_parameters
from rollout.layers.rope import RopeSpec
from rollout.models.spec import ModelSpec

# Llama-shaped, because fewer operators per layer favour an engine without fused ones.
M45 = ModelSpec(
    family="llama",
    vocab_size=32_000,
    hidden_size=512,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1728,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)
SMALL = ModelSpec(
    family="llama",
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
# The shape of Qwen2.5-0.5B, with fewer positions.
QWEN_05B = ModelSpec(
    family="qwen2",
    vocab_size=151_936,
    hidden_size=896,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=4864,
    max_position_embeddings=4096,
    rope=RopeSpec(theta=1e6),
    tie_word_embeddings=True,
    attention_bias=True,
)
# Like Qwen3-MoE: experts are small, and a step uses a small part of the parameters.
MOE64 = ModelSpec(
    family="qwen3_moe",
    vocab_size=8192,
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1728,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    qk_norm=True,
    moe_layers=tuple(range(4)),
    num_experts=64,
    experts_per_token=8,
    expert_size=256,
    router_normalizes=True,
)
SMALL_MOE = replace(
    MOE64,
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    moe_layers=(0, 1),
    head_dim=16,
    expert_size=32,
)
MODELS = {"m45": M45, "small": SMALL}


def transformers_model(spec: ModelSpec, seed: int = 0) -> Any:
    """Return a transformers model of this shape, with random float32 weights."""
    torch.manual_seed(seed)
    values = spec.to_hf_config()
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def num_parameters(spec: ModelSpec) -> int:
    """Return the number of parameters of a dense model without biases. Tied weights count once."""
    layer = layer_matrix_parameters(spec) + 2 * spec.hidden_size
    tables = 1 if spec.tie_word_embeddings else 2
    embeddings = tables * spec.vocab_size * spec.hidden_size
    return spec.num_layers * layer + embeddings + spec.hidden_size
