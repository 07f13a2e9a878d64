"""The shapes that are measured on a GPU, and what physics asks of a step: bytes and operations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from benchmarks.workloads import Workload
from rollout.layers.rope import RopeSpec
from rollout.models.spec import ModelSpec

BLOCK_TOKENS = 256  # of the KV cache


def qwen3(
    *, hidden_size: int, num_layers: int, num_heads: int, intermediate_size: int, tied: bool
) -> ModelSpec:
    """A dense Qwen3 in bfloat16; what all sizes share is as in the public configs."""
    return ModelSpec(
        family="qwen3",
        vocab_size=151_936,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate_size,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope=RopeSpec(theta=1_000_000.0),
        tie_word_embeddings=tied,
        qk_norm=True,
        dtype=torch.bfloat16,
    )


QWEN3 = {
    "0.6B": qwen3(hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=3072, tied=True),
    "4B": qwen3(hidden_size=2560, num_layers=36, num_heads=32, intermediate_size=9728, tied=True),
    "8B": qwen3(
        hidden_size=4096, num_layers=36, num_heads=32, intermediate_size=12_288, tied=False
    ),
}
# Next to no work for the device: what remains of a step is the host's.
NEAR_NOTHING = replace(
    qwen3(hidden_size=128, num_layers=2, num_heads=8, intermediate_size=256, tied=True),
    vocab_size=512,
    num_kv_heads=2,
    head_dim=64,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """A KV pool for `num_rows` sequences of up to `context_len` tokens, in whole blocks."""

    num_rows: int
    context_len: int

    @property
    def num_blocks(self) -> int:
        return self.num_rows * -(-self.context_len // BLOCK_TOKENS)


def layer_matrix_parameters(spec: ModelSpec) -> int:
    """Entries of the matrices of one decoder layer."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return spec.hidden_size * (heads + 3 * spec.intermediate_size)


def weight_bytes(spec: ModelSpec) -> int:
    """Bytes of all weights, tied ones once. Only for models without biases."""
    tables = 1 if spec.tie_word_embeddings else 2
    return weight_bytes_per_step(spec) + (tables - 1) * _table_bytes(spec)


def weight_bytes_per_step(spec: ModelSpec) -> int:
    """Bytes of weights that a decode step must read: all, save an embedding table that is not the
    head's, of which it reads a row per token.
    """
    norms = 2 * spec.hidden_size + (2 * spec.head_dim if spec.qk_norm else 0)
    layers = spec.num_layers * (layer_matrix_parameters(spec) + norms)
    return (layers + spec.hidden_size) * spec.dtype.itemsize + _table_bytes(spec)


def _table_bytes(spec: ModelSpec) -> int:
    return spec.vocab_size * spec.hidden_size * spec.dtype.itemsize


def kv_bytes_per_token(spec: ModelSpec) -> int:
    """Bytes of K and V of one token over all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize


def prefill_flops(spec: ModelSpec, prompt_len: int, num_prompts: int) -> int:
    """Operations of prompts computed whole: the layers for every token, the head for the last one
    of each prompt, and causal attention. A product and its sum count as two.
    """
    layers = 2 * spec.num_layers * layer_matrix_parameters(spec) * prompt_len
    head = 2 * spec.vocab_size * spec.hidden_size
    pairs = prompt_len * (prompt_len + 1) // 2
    attention = 4 * spec.num_layers * spec.num_heads * spec.head_dim * pairs
    return num_prompts * (layers + head + attention)


def generation_bytes(spec: ModelSpec, workload: Workload) -> int:
    """Bytes that decoding a workload must read if all its samples decode together: the weights once
    for each step, and for each token the KV of its context.
    """
    weights = (max(workload.output_lens) - 1) * weight_bytes_per_step(spec)
    contexts = 0
    for prompt, length in zip(workload.prompts, workload.output_lens, strict=True):
        # The first new token comes with the prompt, and has no step of its own.
        contexts += workload.num_samples * sum(len(prompt) + i for i in range(1, length))
    return weights + contexts * kv_bytes_per_token(spec)


def generation_floor_s(
    spec: ModelSpec, workload: Workload, *, bytes_per_s: float, flops_per_s: float
) -> float:
    """Seconds that physics asks for: each prompt computed once, then its samples all at once."""
    flops = sum(prefill_flops(spec, len(prompt), 1) for prompt in workload.prompts)
    return flops / flops_per_s + generation_bytes(spec, workload) / bytes_per_s


def context_that_fits(
    spec: ModelSpec, wanted: PoolShape, free_bytes: int | None, reserve_bytes: int
) -> PoolShape:
    """`wanted`, or a shorter context if memory is short: weights and `reserve_bytes` come first.

    `free_bytes` None means that memory is no matter. Raises RuntimeError if no block per row fits.
    """
    if free_bytes is None:
        return wanted
    block_bytes = kv_bytes_per_token(spec) * BLOCK_TOKENS
    num_blocks = (free_bytes - weight_bytes(spec) - reserve_bytes) // block_bytes
    blocks_per_row = num_blocks // wanted.num_rows
    if blocks_per_row < 1:
        raise RuntimeError(
            f"{free_bytes / 1e9:.1f} GB free: too few for the weights and a block of KV for each "
            f"of {wanted.num_rows} rows"
        )
    fitting = min(wanted.context_len, blocks_per_row * BLOCK_TOKENS)
    return replace(wanted, context_len=fitting)
