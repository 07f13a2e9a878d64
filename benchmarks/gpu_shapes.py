"""Sizes of the GPU benchmark, and the fewest bytes and operations that a step needs.

Used by `benchmarks.gpu`, `benchmarks.gpu_engines`, `benchmarks.gpu_kernels`,
`benchmarks.gpu_measures`, `benchmarks.host_step` and `benchmarks.models`. `PLAN` has the sizes of a
run. `REHEARSAL` has tiny sizes for a CPU, to show that all parts run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from rollout.layers.rope import RopeSpec
from rollout.models.spec import ModelSpec

BLOCK_TOKENS = 256  # tokens of a KV block


def qwen3(
    *, hidden_size: int, num_layers: int, num_heads: int, intermediate_size: int, tied: bool
) -> ModelSpec:
    """Return the spec of a dense Qwen3 model in bfloat16."""
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
    "8B": qwen3(
        hidden_size=4096, num_layers=36, num_heads=32, intermediate_size=12_288, tied=False
    ),
    "0.6B": qwen3(hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=3072, tied=True),
}
# Nearly no work for the device: a step takes as long as the host needs.
NEAR_NOTHING = replace(
    qwen3(hidden_size=128, num_layers=2, num_heads=8, intermediate_size=256, tied=True),
    vocab_size=512,
    num_kv_heads=2,
    head_dim=64,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """Size of a KV pool for `num_rows` sequences of up to `context_len` tokens, in whole blocks."""

    num_rows: int
    context_len: int

    @property
    def num_blocks(self) -> int:
        return self.num_rows * -(-self.context_len // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorSizes:
    """Sizes for the measurement of the device's rates.

    device_bytes, pinned_bytes: bytes of the buffers on the device and in pinned host memory.
    matrix_size: rows and columns of the multiplied matrices.
    num_calls: calls per timing.
    """

    device_bytes: int
    pinned_bytes: int
    matrix_size: int
    num_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All sizes of a run.

    shapes: specs of the models by name, most important first.
    batches: numbers of rows of the decode steps, largest first.
    context_len: prompt and output tokens of every row.
    num_held_rows: rows that decode before and after each suspend and update.
    num_cycles, num_updates: numbers of measured suspends and updates.
    generate_shape: name of the model for the comparison with transformers.
    layer_batches: numbers of rows for the measured attention layer.
    needs_s: seconds that a part may need, by group and step. The part is skipped if fewer are left.
    """

    device: str
    memory_kind: str
    floors: FloorSizes
    shapes: Mapping[str, ModelSpec]
    batches: tuple[int, ...]
    context_len: int
    num_warm_up: int
    num_steps: int
    num_prompts: int
    prompt_len: int
    num_held_rows: int
    num_cycles: int
    num_updates: int
    host_spec: ModelSpec
    host_batches: tuple[int, ...]
    num_host_steps: int
    layer_batches: tuple[int, ...]
    num_layer_calls: int
    generate_shape: str
    num_generate_rows: int
    generate_prompt_len: int
    generate_output_len: int
    needs_s: Mapping[tuple[str, str], float]

    @property
    def pool(self) -> PoolShape:
        """Size of the engines' KV pool: room for the largest batch."""
        return PoolShape(num_rows=max(self.batches), context_len=self.context_len)


PLAN = Plan(
    device="cuda",
    memory_kind="vmm",
    floors=FloorSizes(device_bytes=4 << 30, pinned_bytes=1 << 30, matrix_size=8192, num_calls=20),
    shapes=QWEN3,
    batches=(256, 64, 1),
    context_len=512,
    num_warm_up=8,
    num_steps=32,
    num_prompts=64,
    prompt_len=500,
    num_held_rows=64,
    num_cycles=3,
    num_updates=3,
    host_spec=NEAR_NOTHING,
    host_batches=(256, 1),
    num_host_steps=64,
    layer_batches=(256, 64),
    num_layer_calls=50,
    generate_shape="0.6B",
    num_generate_rows=64,
    generate_prompt_len=128,
    generate_output_len=64,
    # Expected of an H100 at 3 TB/s, 600 TFLOP/s, 50 GB/s over PCIe, 2 GB/s of page-locking:
    #   8B    5 s to import and have a context, 2 s of floors; 5 s for the engine, 4 s to prefill
    #         256 prompts and decode, 2 s for 64 rows and for one, 2 s of prefill; 64 rows hold
    #         4.8 GB: 4 s; the weights are 16.4 GB, locked once by an update and once by a
    #         suspend: 10 s each. 44 s, or 30 s where pages are locked at 4 GB/s.
    #   0.6B  2 s for a context, 3 s for the engine, 5 s for 39 captures, 4 s for what remains,
    #         3 s for the host's share: 17 s.
    #   peers 2 s for a context, 1 s for a layer, 5 s to import transformers, 6 s to generate: 14 s.
    needs_s={
        ("8B", "floors"): 5.0,
        ("8B", "decode"): 12.0,
        ("8B", "prefill"): 3.0,
        ("8B", "suspend rows"): 6.0,
        ("8B", "update"): 12.0,
        ("8B", "suspend weights"): 12.0,
        ("0.6B", "warm-up"): 8.0,
        ("0.6B", "decode"): 3.0,
        ("0.6B", "prefill"): 1.0,
        ("0.6B", "update"): 2.0,
        ("0.6B", "suspend weights"): 2.0,
        ("0.6B", "host"): 3.0,
        ("peers", "layer"): 3.0,
        ("peers", "generate"): 8.0,
    },
)
_TINY = replace(NEAR_NOTHING, dtype=torch.float32)
REHEARSAL = Plan(
    device="cpu",
    memory_kind="reserved",
    floors=FloorSizes(device_bytes=1 << 20, pinned_bytes=1 << 18, matrix_size=64, num_calls=2),
    shapes={"8B": replace(_TINY, tie_word_embeddings=False), "0.6B": _TINY},
    batches=(3, 1),
    context_len=256,
    num_warm_up=2,
    num_steps=4,
    num_prompts=3,
    prompt_len=40,
    num_held_rows=2,
    num_cycles=3,
    num_updates=2,
    host_spec=_TINY,
    host_batches=(2,),
    num_host_steps=5,
    layer_batches=(2,),
    num_layer_calls=2,
    generate_shape="0.6B",
    num_generate_rows=2,
    generate_prompt_len=5,
    generate_output_len=3,
    needs_s=dict.fromkeys(PLAN.needs_s, 0.0),
)


def layer_matrix_parameters(spec: ModelSpec) -> int:
    """Return the number of entries of a decoder layer's matrices, without biases."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return spec.hidden_size * (heads + 3 * spec.intermediate_size)


def weight_bytes(spec: ModelSpec) -> int:
    """Return the bytes of all weights of a model without biases. Tied weights count once."""
    tables = 1 if spec.tie_word_embeddings else 2
    return weight_bytes_per_step(spec) + (tables - 1) * _table_bytes(spec)


def weight_bytes_per_step(spec: ModelSpec) -> int:
    """Return the bytes of weights that a decode step must read.

    These are all weights, except an embedding table that is not also the head.
    """
    norms = 2 * spec.hidden_size + (2 * spec.head_dim if spec.qk_norm else 0)
    layers = spec.num_layers * (layer_matrix_parameters(spec) + norms)
    return (layers + spec.hidden_size) * spec.dtype.itemsize + _table_bytes(spec)


def _table_bytes(spec: ModelSpec) -> int:
    return spec.vocab_size * spec.hidden_size * spec.dtype.itemsize


def kv_bytes_per_token(spec: ModelSpec) -> int:
    """Return the bytes of K and V of one token in all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize


def prefill_flops(spec: ModelSpec, prompt_len: int, num_prompts: int) -> int:
    """Return the floating-point operations of the prefill of whole prompts.

    Counts the layers for every token, the head for the last token of each prompt, and causal
    attention. A multiplication with its addition counts as two.
    """
    layers = 2 * spec.num_layers * layer_matrix_parameters(spec) * prompt_len
    head = 2 * spec.vocab_size * spec.hidden_size
    pairs = prompt_len * (prompt_len + 1) // 2
    attention = 4 * spec.num_layers * spec.num_heads * spec.head_dim * pairs
    return num_prompts * (layers + head + attention)
