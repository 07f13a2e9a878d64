"""DynamicInferenceEngine: creates the parts of an engine and connects them.

Used by programs that step an engine by hand, such as benchmarks, and by `rollout.apis.engines`,
`rollout.apis.spmd` and `rollout.cli.explain`. `rollout.cli.engine_facts` reads EngineBuild.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rollout.backends.base import Backend
from rollout.blocks.kv_cache_manager import KVCacheManager
from rollout.blocks.routing_record import RoutingRecord
from rollout.config import OWN_ENGINE, InferenceConfig, PrefixCachingEvictionPolicy
from rollout.engine.counters import EngineCounters
from rollout.engine.engine import Engine
from rollout.engine.guard import CallGuard
from rollout.engine.input_processor import InputProcessor
from rollout.engine.output_processor import OutputProcessor
from rollout.engine.pipeline import StepPipeline
from rollout.engine.shared_settings import shared_settings
from rollout.engine.suspension import Suspension
from rollout.errors import ConfigError
from rollout.models.causal_lm import CausalLM
from rollout.models.spec import ModelSpec, union_of_ids
from rollout.scheduling.admission import AdmissionLimits
from rollout.scheduling.scheduler import Scheduler
from rollout.step.seeds import given_or_drawn
from rollout.tensor_parallel.executor import SpmdExecutor
from rollout.tensor_parallel.follower import SpmdFollower
from rollout.tensor_parallel.start import (
    join_as_follower,
    join_as_lead,
    num_spmd_ranks,
    start_group,
)
from rollout.text import Tokenizer
from rollout.weights.served import ServedWeights
from rollout.weights.version import MAX_VERSION
from rollout.worker.executor import WorkerExecutor
from rollout.worker.loading import EngineSizes, LoadedModel, load_model, runner_of
from rollout.worker.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBuild:
    """The parts and sizes of an engine, for inspection."""

    config: InferenceConfig
    backend: Backend
    model: CausalLM
    sizes: EngineSizes
    weights: ServedWeights
    routing: RoutingRecord | None


class DynamicInferenceEngine(Engine):
    """The engine that users create with `from_model`. `build` holds its parts and sizes."""

    build: EngineBuild

    @classmethod
    def from_model(
        cls,
        model: str | Path | nn.Module | Any,
        inference_config: InferenceConfig | None = None,
        tokenizer: Tokenizer | None = None,
        weights_version: int = 0,
    ) -> DynamicInferenceEngine:
        """Return a new engine in state RUNNING.

        `model` is a Hugging Face directory, a transformers model or a rollout.models.CausalLM. The
        engine uses a CausalLM itself, without a copy.

        Raises ConfigError for a config that this device or model does not support, and for a
        `pg_collection` of several ranks. Raises ModelError for a model that cannot be built.
        """
        _check_version(weights_version)
        config = inference_config or InferenceConfig()
        if config.engine != OWN_ENGINE:
            raise ConfigError(
                f"engine={config.engine!r} is another engine than this one; make it with LLM, or "
                "with rollout.apis.engines.make_engine"
            )
        if (num_ranks := num_spmd_ranks(config)) > 1:
            raise ConfigError(
                f"pg_collection needs an LLM, whose methods all {num_ranks} ranks call; rank 0 "
                "alone would wait for the others"
            )
        return cls._made_of(*_executor_of(model, config, weights_version), config, tokenizer)

    @property
    def shared_settings(self) -> dict[str, str]:
        """The settings that all engines of a fleet must share, as texts by name."""
        return shared_settings(
            *(self.build.model.spec, self.build.config),
            max_sequence_length=self._inputs.max_sequence_length,
            end_token_ids=self._inputs.end_ids,
        )

    @classmethod
    def leading(
        cls,
        model: str | Path | nn.Module | Any,
        inference_config: InferenceConfig,
        tokenizer: Tokenizer | None,
        weights_version: int,
    ) -> tuple[DynamicInferenceEngine, SpmdExecutor]:
        """Return the engine of rank 0 of `pg_collection.tp`, and its executor. The executor begins
        and ends calls on the other ranks. Raises the errors of `join_as_lead`."""
        _check_version(weights_version)
        loaded, sizes, executor = join_as_lead(model, inference_config, weights_version)
        return cls._made_of(loaded, sizes, executor, inference_config, tokenizer), executor

    @classmethod
    def _made_of(
        cls,
        loaded: LoadedModel,
        sizes: EngineSizes,
        executor: WorkerExecutor,
        config: InferenceConfig,
        tokenizer: Tokenizer | None,
    ) -> DynamicInferenceEngine:
        config = config.replace(seed=given_or_drawn(config.seed, "an engine"))
        backend, causal_lm = loaded.backend, loaded.model
        routing = _routing_record(causal_lm.spec, sizes) if config.record_routing else None
        scheduler = _scheduler(config, sizes, routing)
        counters = EngineCounters(
            writer=config.metrics_writer, interval=config.logging_step_interval
        )
        outputs = OutputProcessor(
            track_paused=config.track_paused_request_events,
            track_generated_tokens=config.track_generated_token_events,
            totals=counters.requests,
            routing=routing,
        )
        guard = CallGuard()
        engine = cls(
            inputs=_input_processor(config, causal_lm, tokenizer, sizes),
            scheduler=scheduler,
            outputs=outputs,
            pipeline=StepPipeline(
                scheduler=scheduler,
                executor=executor,
                outputs=outputs,
                counters=counters,
                guard=guard,
            ),
            executor=executor,
            suspension=Suspension(
                scheduler=scheduler,
                outputs=outputs,
                executor=executor,
                default_mode=config.kv_cache_management_mode,
                keeps_addresses=config.static_kv_memory_pointers
                and not backend.memory.has_stable_addresses,
            ),
            counters=counters,
            guard=guard,
            max_kv_staleness_versions=config.max_kv_staleness_versions,
        )
        engine.build = EngineBuild(
            config=config,
            backend=backend,
            model=causal_lm,
            sizes=sizes,
            weights=loaded.weights,
            routing=routing,
        )
        return engine


def follower_of(
    model: str | Path | nn.Module | Any, config: InferenceConfig, weights_version: int
) -> SpmdFollower:
    """Return the follower for this rank of `pg_collection.tp`, which is not rank 0. Raises the
    errors of `join_as_follower`."""
    _check_version(weights_version)
    return join_as_follower(model, config, weights_version)


def _executor_of(
    model: str | Path | nn.Module | Any, config: InferenceConfig, weights_version: int
) -> tuple[LoadedModel, EngineSizes, WorkerExecutor]:
    """Load the model on `tensor_parallel_size` ranks. Returns the model of rank 0, the sizes of the
    engine and the executor of all ranks."""
    if config.tensor_parallel_size > 1:
        return start_group(model, config, weights_version)
    loaded = load_model(model, config, weights_version)
    loaded.model.prepare(loaded.backend)
    worker = Worker(*runner_of(loaded, loaded.sizes), loaded.weights)
    return loaded, loaded.sizes, WorkerExecutor(worker)


def _check_version(weights_version: int) -> None:
    if not isinstance(weights_version, int) or abs(weights_version) > MAX_VERSION:
        raise ConfigError(
            f"weights_version={weights_version!r} must be an integer within ±{MAX_VERSION}"
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
    assert config.seed is not None, "from_model has drawn one"
    return InputProcessor(
        limits=limits,
        tokenizer=tokenizer,
        end_ids=tuple(union_of_ids(tokenizer_end, model.spec.eos_token_ids)),
        block_size=sizes.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        seed=config.seed,
    )
