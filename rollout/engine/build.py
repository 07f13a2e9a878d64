"""DynamicInferenceEngine.from_model: the only place where an engine's parts are made and wired."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rollout.backends.base import Backend
from rollout.backends.select import block_size_of, create_backend
from rollout.blocks.kv_cache_manager import KVCacheManager
from rollout.blocks.routing_record import RoutingRecord
from rollout.config import (
    DEFAULT_MAX_REQUESTS,
    DEFAULT_MAX_TOKENS,
    GIB,
    InferenceConfig,
    PrefixCachingEvictionPolicy,
)
from rollout.engine.engine import Engine
from rollout.engine.input_processor import InputProcessor
from rollout.engine.output_processor import OutputProcessor
from rollout.engine.pipeline import StepPipeline
from rollout.engine.reports import EngineCounters
from rollout.engine.suspension import Suspension
from rollout.errors import ConfigError
from rollout.kv.cache import KVCache
from rollout.kv.layout import bytes_per_block, num_blocks_in
from rollout.models.causal_lm import CausalLM
from rollout.models.loading import open_model
from rollout.models.spec import ModelSpec, union_of_ids
from rollout.runner.batch_builder import BatchBuilder
from rollout.runner.model_runner import ModelRunner
from rollout.runner.weight_update import MAX_VERSION
from rollout.runner.weights import ServedWeights
from rollout.scheduling.admission import AdmissionLimits
from rollout.scheduling.scheduler import Scheduler
from rollout.text import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_BUFFER_GB = 20.0
DEFAULT_MEMORY_FRACTION = 0.25
_NUM_CPU_POSITIONS = 4096  # of the rotary table when the engine starts; it grows


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """What an engine can hold: tokens of a block, of a sequence and of a step, requests in context,
    blocks in the pool and blocks that paused requests may keep.
    """

    block_size: int
    max_sequence_length: int
    max_tokens: int
    num_rows: int
    num_blocks: int
    max_paused_blocks: int

    @property
    def max_blocks_per_row(self) -> int:
        """Blocks of a sequence of `max_sequence_length` tokens."""
        return -(-self.max_sequence_length // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBuild:
    """What an engine was made of; to be read only."""

    config: InferenceConfig
    backend: Backend
    model: CausalLM
    sizes: EngineSizes
    weights: ServedWeights
    routing: RoutingRecord | None


class DynamicInferenceEngine(Engine):
    """The engine that users make, by `from_model`. `build` says what it was made of."""

    build: EngineBuild

    @classmethod
    def from_model(
        cls,
        model: str | Path | nn.Module | Any,
        inference_config: InferenceConfig | None = None,
        tokenizer: Tokenizer | None = None,
        weights_version: int = 0,
    ) -> DynamicInferenceEngine:
        """Return an engine in RUNNING. `model` is a Hugging Face directory, a transformers model or
        a rollout.models.CausalLM, which then belongs to the engine.

        Raises ConfigError for a config this device or model cannot honour, ModelError for a model
        that cannot be built.
        """
        _check_version(weights_version)
        config = inference_config or InferenceConfig()
        build = _model_on_device(model, config, weights_version)
        backend, causal_lm, sizes, weights = build.backend, build.model, build.sizes, build.weights
        kv = KVCache(backend, causal_lm.cache_spec(sizes.block_size), sizes.num_blocks)
        runner = ModelRunner(
            model=causal_lm,
            backend=backend,
            kv=kv,
            builder=_batch_builder(sizes),
            records_routing=config.record_routing,
        )
        scheduler = _scheduler(config, sizes, build.routing)
        counters = EngineCounters(
            writer=config.metrics_writer, interval=config.logging_step_interval
        )
        outputs = OutputProcessor(
            track_paused=config.track_paused_request_events,
            track_generated_tokens=config.track_generated_token_events,
            routing=build.routing,
        )
        engine = cls(
            inputs=_input_processor(config, causal_lm, tokenizer, sizes),
            scheduler=scheduler,
            outputs=outputs,
            pipeline=StepPipeline(
                scheduler=scheduler, runner=runner, outputs=outputs, counters=counters
            ),
            kv=kv,
            weights=weights,
            suspension=Suspension(
                scheduler=scheduler,
                outputs=outputs,
                kv=kv,
                weights=weights,
                runner=runner,
                default_mode=config.kv_cache_management_mode,
                keeps_addresses=config.static_kv_memory_pointers
                and not backend.memory.has_stable_addresses,
            ),
            counters=counters,
            max_kv_staleness_versions=config.max_kv_staleness_versions,
        )
        engine.build = build
        return engine


def _model_on_device(
    model: str | Path | nn.Module | Any, config: InferenceConfig, weights_version: int
) -> EngineBuild:
    """Load the model onto the device that `config` asks for, and choose its products."""
    backend = create_backend(config)
    causal_lm, fill = open_model(model, dtype=config.dtype, device=backend.device, seed=config.seed)
    if config.record_routing and not causal_lm.spec.num_moe_layers:
        raise ConfigError(
            f"record_routing=True with a {causal_lm.spec.family!r} model without experts, which "
            "has nothing to record; leave it False"
        )
    sizes = _sizes(config, backend, causal_lm)
    weights = ServedWeights(
        causal_lm,
        backend,
        version=weights_version,
        reject_non_finite=config.reject_non_finite_weights,
        fill=fill,
    )
    causal_lm.prepare(backend)
    # Only graphs need the whole table, which takes gigabytes for a million positions.
    num_positions = sizes.max_blocks_per_row * sizes.block_size
    if backend.device.type == "cpu":
        num_positions = min(num_positions, _NUM_CPU_POSITIONS)
    causal_lm.reserve_positions(num_positions)
    backend.executor.prepare(sizes.max_blocks_per_row)
    return EngineBuild(
        config=config,
        backend=backend,
        model=causal_lm,
        sizes=sizes,
        weights=weights,
        routing=_routing_record(causal_lm.spec, sizes) if config.record_routing else None,
    )


def _check_version(weights_version: int) -> None:
    if not isinstance(weights_version, int) or abs(weights_version) > MAX_VERSION:
        raise ConfigError(
            f"weights_version={weights_version!r} must be an integer within ±{MAX_VERSION}"
        )


def _sizes(config: InferenceConfig, backend: Backend, model: CausalLM) -> EngineSizes:
    longest = longest_sequence(config, model.spec)
    max_tokens = config.max_tokens or DEFAULT_MAX_TOKENS
    max_requests = config.max_requests or DEFAULT_MAX_REQUESTS
    block_size, paused_gb = block_size_of(config), config.paused_buffer_size_gb or 0.0
    spec = model.cache_spec(block_size)
    if config.buffer_size_gb is not None:
        # In unified memory, paused requests have their buffer beside that of the others.
        added_gb = paused_gb if config.unified_memory_level else 0.0
        num_blocks = num_blocks_in(backend.attention, spec, config.buffer_size_gb + added_gb)
    else:
        usable = max_requests * -(-longest // block_size)
        buffer_gb = min(DEFAULT_BUFFER_GB, DEFAULT_MEMORY_FRACTION * backend.memory_bytes / GIB)
        num_blocks = min(usable, num_blocks_in(backend.attention, spec, buffer_gb))
    pool_tokens = num_blocks * block_size
    if config.max_sequence_length is None and longest > pool_tokens:
        logger.info(
            "max_sequence_length=%d: the KV pool holds no longer sequence, and the model could do "
            "%d; raise buffer_size_gb for more",
            *(pool_tokens, longest),
        )
        longest = pool_tokens
    return EngineSizes(
        block_size=block_size,
        max_sequence_length=longest,
        max_tokens=max_tokens,
        # A request in context needs a block, and a token of every step.
        num_rows=min(max_requests, max_tokens, num_blocks),
        num_blocks=num_blocks,
        max_paused_blocks=int(paused_gb * GIB) // bytes_per_block(backend.attention, spec),
    )


def longest_sequence(config: InferenceConfig, spec: ModelSpec) -> int:
    """Return the config's longest sequence; without one, that of the model.

    Raises ConfigError for a length that the model cannot do.
    """
    rope, longest = spec.rope, spec.max_position_embeddings
    # Whether max_position_embeddings counts before or after the scaling depends on its kind.
    if rope.kind == "linear":
        longest = int(longest * max(1.0, rope.factor))
    elif rope.kind == "yarn":
        longest = max(longest, int(rope.original_max_positions * rope.factor))
    elif rope.kind == "longrope":
        # Beyond, a sequence has other angles at all of its positions, also those in the cache.
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


def _batch_builder(sizes: EngineSizes) -> BatchBuilder:
    return BatchBuilder(
        num_rows=sizes.num_rows,
        max_blocks=sizes.max_blocks_per_row,
        block_size=sizes.block_size,
    )


def _routing_record(spec: ModelSpec, sizes: EngineSizes) -> RoutingRecord:
    return RoutingRecord(
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        num_layers=spec.num_moe_layers,
        top_k=spec.experts_per_token,
        num_experts=spec.num_experts,
    )


def _scheduler(
    config: InferenceConfig, sizes: EngineSizes, routing: RoutingRecord | None
) -> Scheduler:
    kv_cache_manager = KVCacheManager(
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        num_rows=sizes.num_rows,
        enable_prefix_caching=config.enable_prefix_caching,
        keeps_unused=config.prefix_caching_eviction_policy is PrefixCachingEvictionPolicy.LRU,
        reuse_across_versions=config.prefix_reuse_across_versions,
        max_age_versions=config.max_kv_staleness_versions,
    )
    conservativeness = config.schedule_conservativeness
    if conservativeness is None:
        conservativeness = 1.0 if config.paused_buffer_size_gb is None else 0.0
    return Scheduler(
        kv_cache_manager,
        max_tokens=sizes.max_tokens,
        max_paused_blocks=sizes.max_paused_blocks,
        enable_chunked_prefill=config.enable_chunked_prefill,
        schedule_conservativeness=conservativeness,
        routing=routing,
    )


def _input_processor(
    config: InferenceConfig, model: CausalLM, tokenizer: Tokenizer | None, sizes: EngineSizes
) -> InputProcessor:
    limits = AdmissionLimits(
        vocab_size=model.spec.vocab_size,
        max_sequence_length=sizes.max_sequence_length,
        max_pool_tokens=sizes.num_blocks * sizes.block_size,
        max_tokens_per_step=sizes.max_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        can_score_prompts=not config.materialize_only_last_token_logits,
    )
    tokenizer_end = None if tokenizer is None else tokenizer.eos_id
    return InputProcessor(
        limits=limits,
        tokenizer=tokenizer,
        end_ids=tuple(union_of_ids(tokenizer_end, model.spec.eos_token_ids)),
        block_size=sizes.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        seed=config.seed,
    )
