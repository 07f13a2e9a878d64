"""Loads one rank of an engine: its device, its part of the model, its sizes and memory.

Used by `rollout.engine.build`, by `rollout.tensor_parallel.start` and
`rollout.tensor_parallel.follower` on each rank, and by `rollout.cli.engine_facts` for defaults. It
opens checkpoint files, and reserves memory on the device.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollout.backends.base import Backend
from rollout.backends.select import block_size_of, create_backend
from rollout.config import DEFAULT_MAX_REQUESTS, DEFAULT_MAX_TOKENS, GIB, UNIFIED, InferenceConfig
from rollout.errors import ConfigError
from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoints.loading import open_model
from rollout.models.spec import ModelSpec
from rollout.parallel.collectives import ONE_RANK, Collectives
from rollout.weights.served import ServedWeights
from rollout.worker.batch_builder import BatchBuilder
from rollout.worker.kv_cache import KVCache, bytes_per_block, num_blocks_in
from rollout.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

DEFAULT_BUFFER_GB = 20.0
DEFAULT_MEMORY_FRACTION = 0.25
_NUM_CPU_POSITIONS = 4096  # in the rotary tables when an engine starts on a CPU; they grow


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """Sizes of an engine.

    block_size: tokens per KV block.
    max_tokens: tokens per step.
    num_rows: requests that can run at once.
    num_blocks: KV blocks in the pool.
    max_paused_blocks: KV blocks that paused requests can keep."""

    block_size: int
    max_sequence_length: int
    max_tokens: int
    num_rows: int
    num_blocks: int
    max_paused_blocks: int

    @property
    def max_blocks_per_row(self) -> int:
        """Number of KV blocks of a sequence of `max_sequence_length` tokens."""
        return -(-self.max_sequence_length // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A rank's part of the model on its device, and the engine sizes that fit there."""

    config: InferenceConfig
    backend: Backend
    model: CausalLM
    sizes: EngineSizes
    weights: ServedWeights


def load_model(
    model: str | Path | nn.Module | Any,
    config: InferenceConfig,
    weights_version: int,
    collectives: Collectives = ONE_RANK,
) -> LoadedModel:
    """Load this rank's part of the model onto the device that `config` names. `CausalLM.prepare`
    must be called on the model before it runs. Raises ConfigError and ModelError."""
    backend = create_backend(config, collectives)
    causal_lm, fill = open_model(
        model,
        dtype=config.dtype,
        device=backend.device,
        seed=config.seed or 0,  # for random weights, which must be equal on all ranks and engines
        rank=collectives.rank,
        size=collectives.size,
    )
    if config.record_routing and not causal_lm.spec.num_moe_layers:
        raise ConfigError(
            f"record_routing=True with a {causal_lm.spec.family!r} model without experts, which "
            "has nothing to record; leave it False"
        )
    if causal_lm.spec.dtype is torch.float32 and backend.device.type != "cpu":
        logger.warning(
            "dtype=float32 on %s: twice the memory of bfloat16, and a fraction of its speed; set "
            "dtype='bfloat16' unless numbers are compared",
            backend.device,
        )
    sizes = sizes_of(config, backend, causal_lm)
    weights = ServedWeights(
        causal_lm,
        backend,
        version=weights_version,
        reject_non_finite=config.reject_non_finite_weights,
        fill=fill,
    )
    return LoadedModel(
        config=config, backend=backend, model=causal_lm, sizes=sizes, weights=weights
    )


def sizes_of(
    config: InferenceConfig, backend: Backend, model: CausalLM, most_blocks: int | None = None
) -> EngineSizes:
    """Return the engine sizes that fit this rank, with a pool of at most `most_blocks` blocks. None
    sets no such limit. Raises ConfigError if no KV block fits, or if the config's
    `max_sequence_length` exceeds the model's."""
    longest = longest_sequence(config, model.spec)
    max_tokens = config.max_tokens or DEFAULT_MAX_TOKENS
    max_requests = config.max_requests or DEFAULT_MAX_REQUESTS
    block_size, paused_gb = block_size_of(config), config.paused_buffer_size_gb or 0.0
    num_ranks = backend.collectives.size
    spec = model.cache_spec(block_size)
    if config.buffer_size_gb is not None:
        # In unified memory, the buffer of paused requests adds to the buffer of running ones.
        is_unified = config.unified_memory_level or config.memory_kind == UNIFIED
        added_gb = paused_gb if is_unified else 0.0
        buffer_gb = (config.buffer_size_gb + added_gb) / num_ranks
        num_blocks = num_blocks_in(backend.attention, spec, buffer_gb)
    else:
        usable = max_requests * -(-longest // block_size)
        # The ranks of a host share its memory; each device has its own.
        num_sharing = num_ranks if backend.device.type == "cpu" else 1
        memory_gb = DEFAULT_MEMORY_FRACTION * backend.memory_bytes / GIB / num_sharing
        buffer_gb = min(DEFAULT_BUFFER_GB / num_ranks, memory_gb)
        num_blocks = min(usable, num_blocks_in(backend.attention, spec, buffer_gb))
    num_blocks = num_blocks if most_blocks is None else min(num_blocks, most_blocks)
    pool_tokens = num_blocks * block_size
    if config.max_sequence_length is None and longest > pool_tokens:
        logger.info(
            "max_sequence_length=%d: the KV pool holds no longer sequence, and the model allows "
            "%d; raise buffer_size_gb for more",
            *(pool_tokens, longest),
        )
        longest = pool_tokens
    bytes_of_all = bytes_per_block(backend.attention, spec) * num_ranks
    return EngineSizes(
        block_size=block_size,
        max_sequence_length=longest,
        max_tokens=max_tokens,
        # A running request needs at least a block, and a token of every step.
        num_rows=min(max_requests, max_tokens, num_blocks),
        num_blocks=num_blocks,
        max_paused_blocks=int(paused_gb * GIB) // bytes_of_all,
    )


def longest_sequence(config: InferenceConfig, spec: ModelSpec) -> int:
    """Return the config's `max_sequence_length`, or the model's longest sequence if that is None.
    Raises ConfigError if the config's length exceeds the model's."""
    rope, longest = spec.rope, spec.max_position_embeddings
    # Whether max_position_embeddings counts before or after the scaling depends on its kind.
    if rope.kind == "linear":
        longest = int(longest * max(1.0, rope.factor))
    elif rope.kind == "yarn":
        longest = max(longest, int(rope.original_max_positions * rope.factor))
    elif rope.kind == "longrope":
        # A longer sequence would change the angles of all its positions, also of cached ones.
        longest = min(longest, rope.original_max_positions)
    wanted = config.max_sequence_length
    if wanted is None:
        return longest
    if wanted > longest:
        raise ConfigError(
            f"max_sequence_length={wanted} is more than the model's {longest} positions "
            f"(max_position_embeddings={spec.max_position_embeddings}, rope {rope.kind!r}); lower "
            "it, or give the model's config a rope scaling that reaches as far"
        )
    return wanted


def runner_of(loaded: LoadedModel, sizes: EngineSizes) -> tuple[ModelRunner, KVCache]:
    """Make this rank's model runner and KV cache for an engine of these sizes. Reserves the memory
    of the KV cache and of the rotary tables. `CausalLM.prepare` must have been called."""
    backend, model = loaded.backend, loaded.model
    # Only captured graphs need whole rotary tables: gigabytes for a million positions.
    num_positions = sizes.max_blocks_per_row * sizes.block_size
    if backend.device.type == "cpu":
        num_positions = min(num_positions, _NUM_CPU_POSITIONS)
    model.reserve_positions(num_positions)
    backend.executor.prepare(sizes.max_blocks_per_row, model.spec.vocab_size)
    kv = KVCache(backend, model.cache_spec(sizes.block_size), sizes.num_blocks)
    builder = BatchBuilder(
        num_rows=sizes.num_rows,
        max_blocks=sizes.max_blocks_per_row,
        block_size=sizes.block_size,
    )
    records_routing = loaded.config.record_routing
    return ModelRunner(model, backend, kv, builder, records_routing=records_routing), kv
