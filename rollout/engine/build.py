"""The only wirer: from a model and a config to an engine that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from rollout.backends.base import Backend, CacheSpec
from rollout.backends.select import create_backend
from rollout.blocks.kv_cache_manager import KVCacheManager
from rollout.config import (
    DEFAULT_MAX_REQUESTS,
    DEFAULT_MAX_SEQUENCE_LENGTH,
    DEFAULT_MAX_TOKENS,
    GIB,
    InferenceConfig,
    PrefixCachingEvictionPolicy,
)
from rollout.engine.counters import EngineTelemetry
from rollout.engine.engine import Engine
from rollout.engine.intake import RequestIntake
from rollout.engine.pipeline import StepPipeline
from rollout.engine.request_book import RequestBook
from rollout.engine.request_desk import RequestDesk
from rollout.engine.served_weights import ServedWeights
from rollout.engine.suspension import Suspension
from rollout.errors import ConfigError
from rollout.kv.cache import KVCache
from rollout.kv.layout import bytes_per_block, num_blocks_in
from rollout.models.causal_lm import CausalLM
from rollout.models.loading import build_model
from rollout.models.spec import ModelSpec, union_of_ids
from rollout.runner.batch_builder import BatchBuilder
from rollout.runner.model_runner import ModelRunner
from rollout.runner.weight_store import WeightStore
from rollout.runner.weight_update import MAX_VERSION, WeightUpdater
from rollout.scheduling.admission import AdmissionLimits
from rollout.scheduling.scheduler import Scheduler
from rollout.text import Tokenizer

DEFAULT_BUFFER_GB = 20.0
DEFAULT_MEMORY_FRACTION = 0.25


class DynamicInferenceEngine(Engine):
    """The engine, wired. Made by `from_model`."""

    @classmethod
    def from_model(
        cls,
        model: str | Path | nn.Module | Any,
        inference_config: InferenceConfig | None = None,
        tokenizer: Tokenizer | None = None,
        weights_version: int = 0,
    ) -> DynamicInferenceEngine:
        """An engine in RUNNING. `model` is a Hugging Face directory, a transformers model, or ours.

        Raises ConfigError for a config this device or model cannot honour, ModelError for a model
        that cannot be built.
        """
        config = inference_config or InferenceConfig()
        _check_version(weights_version)
        backend = create_backend(config)
        causal_lm = build_model(model, dtype=config.dtype, device=backend.device, seed=config.seed)
        max_sequence_length = _max_sequence_length(config, causal_lm.spec)
        weights = WeightStore(causal_lm, backend.memory, backend.create_host_arena())
        causal_lm.prepare(backend)
        causal_lm.reserve_positions(max_sequence_length)
        cache_spec = causal_lm.cache_spec(config.block_size_tokens)
        max_tokens = config.max_tokens or DEFAULT_MAX_TOKENS
        num_blocks = _num_blocks(config, backend, cache_spec, max_sequence_length)
        kv = KVCache(backend, cache_spec, num_blocks)
        builder = BatchBuilder(
            num_rows=_num_rows(config, num_blocks, max_tokens),
            max_blocks=-(-max_sequence_length // config.block_size_tokens),
            block_size=config.block_size_tokens,
        )
        runner = ModelRunner(causal_lm, backend, kv, builder)
        scheduler = _scheduler(config, backend, cache_spec, num_blocks, max_tokens)
        telemetry = EngineTelemetry(config.metrics_writer, config.logging_step_interval)
        book = RequestBook(
            track_paused=config.track_paused_request_events,
            track_generated_tokens=config.track_generated_token_events,
        )
        limits = _limits(config, causal_lm, num_blocks, max_tokens, max_sequence_length)
        intake = _intake(config, causal_lm, tokenizer, limits)
        return cls(
            scheduler=scheduler,
            pipeline=StepPipeline(scheduler, runner, book, telemetry),
            weights=ServedWeights(_updater(config, backend, causal_lm), weights, weights_version),
            kv=kv,
            book=book,
            desk=RequestDesk(intake, book, scheduler, kv),
            telemetry=telemetry,
            suspension=Suspension(
                *(scheduler, kv, weights, book, runner, config.kv_cache_management_mode),
                must_stay=(
                    config.static_kv_memory_pointers and not backend.memory.has_stable_addresses
                ),
            ),
            max_kv_staleness_versions=config.max_kv_staleness_versions,
        )


def _check_version(weights_version: int) -> None:
    if not isinstance(weights_version, int) or abs(weights_version) > MAX_VERSION:
        raise ConfigError(
            f"weights_version={weights_version!r} must be an integer within ±{MAX_VERSION}"
        )


def _max_sequence_length(config: InferenceConfig, spec: ModelSpec) -> int:
    """The config's, or its default as far as the model goes. Raises ConfigError beyond that."""
    rope, longest = spec.rope, spec.max_position_embeddings
    # Whether max_position_embeddings is of before or after the scaling depends on its kind.
    if rope.kind == "linear":
        longest = int(longest * max(1.0, rope.factor))
    elif rope.kind == "yarn":
        longest = max(longest, int(rope.original_max_positions * rope.factor))
    wanted = config.max_sequence_length
    if wanted is None:
        return min(DEFAULT_MAX_SEQUENCE_LENGTH, longest)
    if wanted > longest:
        raise ConfigError(
            f"max_sequence_length={wanted} is more than the model's {longest} positions "
            f"(max_position_embeddings={spec.max_position_embeddings}, rope {rope.kind!r}); lower "
            "it, or give the model's config a rope scaling that reaches as far"
        )
    return wanted


def _intake(
    config: InferenceConfig, model: CausalLM, tokenizer: Tokenizer | None, limits: AdmissionLimits
) -> RequestIntake:
    return RequestIntake(
        limits=limits,
        tokenizer=tokenizer,
        end_ids=_end_ids(model, tokenizer),
        block_size=config.block_size_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        seed=config.seed,
    )


def _updater(config: InferenceConfig, backend: Backend, model: CausalLM) -> WeightUpdater:
    return WeightUpdater(model, backend.ops, reject_non_finite=config.reject_non_finite_weights)


def _num_blocks(
    config: InferenceConfig, backend: Backend, spec: CacheSpec, max_sequence_length: int
) -> int:
    """Blocks in the pool: of `buffer_size_gb`, or as many as could ever be used within the
    defaults. In unified memory the buffer for paused requests comes on top.
    """
    if config.buffer_size_gb is not None:
        on_top = config.paused_buffer_size_gb if config.unified_memory_level else None
        return num_blocks_in(backend.attention, spec, config.buffer_size_gb + (on_top or 0.0))
    max_requests = config.max_requests or DEFAULT_MAX_REQUESTS
    usable = max_requests * -(-max_sequence_length // config.block_size_tokens)
    buffer_gb = min(DEFAULT_BUFFER_GB, DEFAULT_MEMORY_FRACTION * backend.memory_bytes / GIB)
    return min(usable, num_blocks_in(backend.attention, spec, buffer_gb))


def _num_rows(config: InferenceConfig, num_blocks: int, max_tokens: int) -> int:
    """Requests that can be in context: each needs a block, and a token of every step."""
    return min(config.max_requests or DEFAULT_MAX_REQUESTS, max_tokens, num_blocks)


def _scheduler(
    config: InferenceConfig, backend: Backend, spec: CacheSpec, num_blocks: int, max_tokens: int
) -> Scheduler:
    kv_cache_manager = KVCacheManager(
        num_blocks=num_blocks,
        block_size=config.block_size_tokens,
        num_rows=_num_rows(config, num_blocks, max_tokens),
        enable_prefix_caching=config.enable_prefix_caching,
        keeps_unused=config.prefix_caching_eviction_policy is PrefixCachingEvictionPolicy.LRU,
        reuse_across_versions=config.prefix_reuse_across_versions,
        max_age_versions=config.max_kv_staleness_versions,
    )
    return Scheduler(
        kv_cache_manager,
        max_tokens=max_tokens,
        max_paused_blocks=_max_paused_blocks(config, backend, spec),
        enable_chunked_prefill=config.enable_chunked_prefill,
        schedule_conservativeness=_conservativeness(config),
    )


def _max_paused_blocks(config: InferenceConfig, backend: Backend, spec: CacheSpec) -> int:
    if config.paused_buffer_size_gb is None:
        return 0
    return int(config.paused_buffer_size_gb * GIB) // bytes_per_block(backend.attention, spec)


def _conservativeness(config: InferenceConfig) -> float:
    if config.schedule_conservativeness is not None:
        return config.schedule_conservativeness
    return 1.0 if config.paused_buffer_size_gb is None else 0.0


def _limits(
    config: InferenceConfig,
    model: CausalLM,
    num_blocks: int,
    max_tokens: int,
    max_sequence_length: int,
) -> AdmissionLimits:
    return AdmissionLimits(
        vocab_size=model.spec.vocab_size,
        max_sequence_length=max_sequence_length,
        max_pool_tokens=num_blocks * config.block_size_tokens,
        max_tokens_per_step=max_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        can_score_prompts=not config.materialize_only_last_token_logits,
    )


def _end_ids(model: CausalLM, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end a request by default: the tokenizer's and those of the model's configs."""
    own = None if tokenizer is None else tokenizer.eos_id
    return tuple(union_of_ids(own, model.spec.eos_token_ids))
