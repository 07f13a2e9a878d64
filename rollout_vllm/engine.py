"""make_engine: an Engine whose steps are vLLM's. make_weight_transport: vLLM's weight transfer.

`rollout.apis.engines` calls the first for `InferenceConfig(engine="vllm")`, and
`rollout.weights.transports.registry` the second for `weight_transport="vllm:..."`. They find this
module by an entry point.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollout.config import InferenceConfig
from rollout.engine.counters import EngineCounters
from rollout.engine.engine import Engine
from rollout.engine.guard import CallGuard
from rollout.engine.output_processor import OutputProcessor
from rollout.errors import ConfigError, ModelError
from rollout.models.checkpoints.directory import fault_of_directory
from rollout.scheduling.admission import AdmissionLimits
from rollout.step.seeds import given_or_drawn
from rollout.text import Tokenizer
from rollout.weights.transports.base import WeightTransport
from rollout_vllm.inputs import CheckedInputProcessor, end_ids, shared_settings
from rollout_vllm.installed import require_vllm
from rollout_vllm.options import check_params, engine_arguments
from rollout_vllm.transfer import require_backend

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore


class VllmEngine(Engine):
    """An Engine over vLLM. `core`: vLLM's EngineCore, which it owns. `model_settings`: what all
    engines of a fleet must share."""

    core: EngineCore
    model_settings: dict[str, str]

    @property
    def shared_settings(self) -> dict[str, str]:
        """The settings that all engines of a fleet must share, as texts by name."""
        return self.model_settings


def make_engine(
    model: str | Path | Any,
    config: InferenceConfig,
    tokenizer: Tokenizer | None = None,
    weights_version: int = 0,
) -> VllmEngine:
    """Return an engine in RUNNING. `model` is a Hugging Face directory with safetensors.

    Raises ConfigError without a supported vLLM, for a field that vLLM cannot follow, and for an
    engine option that would break a promise; ModelError for another model.
    """
    require_vllm()
    if not isinstance(model, str | Path):
        raise ModelError(
            f"engine='vllm' takes the directory of a model, not a {type(model).__name__}: write it "
            "with save_pretrained(DIR), and pass DIR"
        )
    if fault := fault_of_directory(model):
        raise ModelError(fault)
    directory = Path(model)
    if not any(directory.glob("*.safetensors")):
        raise ModelError(f"{directory} holds no *.safetensors; write it with save_pretrained")
    seed = given_or_drawn(config.seed, "an engine")
    config = config.replace(seed=seed)
    arguments = {**engine_arguments(config), "seed": seed % 2**31}
    core = _new_core(directory, arguments, config)
    try:
        return _engine_over(core, directory, config, tokenizer, weights_version)
    except BaseException:
        core.shutdown()
        raise


def make_weight_transport(
    name: str, *, own_host: Callable[[], str], reject_non_finite: bool
) -> WeightTransport:
    """Return the transport of weight_transport="vllm:NAME", where `name` is BACKEND or
    BACKEND:HOST. `own_host` returns the host if none is named.

    Raises ConfigError for an unknown backend, and without a supported vLLM.
    """
    backend, _, host = name.partition(":")
    require_backend(backend)
    require_vllm()
    from rollout_vllm.transfer_sender import VllmTransport

    return VllmTransport(backend, host or own_host(), reject_non_finite=reject_non_finite)


def _new_core(directory: Path, arguments: dict[str, Any], config: InferenceConfig) -> EngineCore:
    """Start vLLM. Raises ConfigError for arguments that it refuses or would not follow."""
    # The scheduler must lie in this process.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if config.num_threads is not None:  # otherwise vLLM binds a thread to each core that it finds
        os.environ["OMP_NUM_THREADS"] = str(config.num_threads)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        torch.set_num_threads(config.num_threads)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from rollout_vllm.stamps import AsyncStampingScheduler, StampingScheduler

    kind = AsyncStampingScheduler if arguments["async_scheduling"] else StampingScheduler
    try:
        vllm_config = EngineArgs(
            model=str(directory),
            scheduler_cls=f"{kind.__module__}.{kind.__name__}",
            **arguments,
        ).create_engine_config()
        _check_device(config.device)
        _check_async(arguments, vllm_config)
        _check_stages(vllm_config)
        return EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vLLM refuses its arguments: {' '.join(str(error).split())}") from error


def _engine_over(
    core: EngineCore,
    directory: Path,
    config: InferenceConfig,
    tokenizer: Tokenizer | None,
    weights_version: int,
) -> VllmEngine:
    """Return an engine whose parts use `core`."""
    from rollout_vllm.executor import VllmExecutor
    from rollout_vllm.pipeline import VllmPipeline
    from rollout_vllm.scheduler import VllmScheduler
    from rollout_vllm.suspension import VllmSuspension

    vllm_config = core.vllm_config
    scheduler = VllmScheduler(
        core,
        reuse_across_versions=config.prefix_reuse_across_versions,
        shares_prefixes=config.enable_prefix_caching,
    )
    executor = VllmExecutor(
        core,
        directory,
        weights_version,
        reject_non_finite=config.reject_non_finite_weights,
        keeps_base=bool(config.engine_options.get("enable_lora")),
    )
    counters = EngineCounters(writer=config.metrics_writer, interval=config.logging_step_interval)
    guard = CallGuard()
    outputs = OutputProcessor(
        track_paused=False,
        track_generated_tokens=config.track_generated_token_events,
        totals=counters.requests,
    )
    inputs = _input_processor(vllm_config, scheduler, directory, config, tokenizer)
    engine = VllmEngine(
        inputs=inputs,
        scheduler=scheduler,
        outputs=outputs,
        pipeline=VllmPipeline(core, scheduler, outputs, counters, guard),
        executor=executor,
        suspension=VllmSuspension(
            core,
            scheduler,
            executor,
            outputs,
            config.kv_cache_management_mode,
            has_sleep=vllm_config.model_config.enable_sleep_mode,
        ),
        counters=counters,
        guard=guard,
        max_kv_staleness_versions=config.max_kv_staleness_versions,
    )
    engine.core = core
    engine.weight_fetchers = executor.receiver.fetchers
    model = vllm_config.model_config
    engine.model_settings = shared_settings(
        inputs,
        config,
        directory,
        dtype=str(model.dtype),
        quantization=model.quantization,
        logprobs_mode=model.logprobs_mode,
    )
    return engine


def _check_device(device: str) -> None:
    """Raise ConfigError if this build of vLLM runs on another device."""
    from vllm.platforms import current_platform

    if device not in ("auto", current_platform.device_type):
        raise ConfigError(
            f"device={device!r} contradicts this build of vLLM, which runs on "
            f"{current_platform.device_type!r}; leave it out, and choose GPUs by "
            "CUDA_VISIBLE_DEVICES"
        )


def _check_async(arguments: dict[str, Any], vllm_config: VllmConfig) -> None:
    """Raise ConfigError if vLLM has switched off the asynchronous scheduling that was asked for."""
    if arguments["async_scheduling"] and not vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            "engine_options['async_scheduling']=True: vLLM schedules synchronously on this "
            "platform; leave it out"
        )


def _check_stages(vllm_config: VllmConfig) -> None:
    """Raise ConfigError for pipeline parallelism on a CPU. vLLM 0.32 fails there at the first step:
    its runner never allocates the tensors that a later stage receives."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1 and vllm_config.device_config.device_type == "cpu":
        raise ConfigError(
            f"engine_options['pipeline_parallel_size']={stages} does not work on a CPU with vLLM "
            "0.32; use tensor_parallel_size"
        )


def _input_processor(
    vllm_config: VllmConfig,
    scheduler: Any,
    directory: Path,
    config: InferenceConfig,
    tokenizer: Tokenizer | None,
) -> CheckedInputProcessor:
    model, pool = vllm_config.model_config, scheduler.vllm.kv_cache_config
    limits = AdmissionLimits(
        vocab_size=model.get_vocab_size(),
        max_sequence_length=model.max_model_len,
        max_pool_tokens=(pool.num_blocks - 1) * scheduler.block_size,
        max_tokens_per_step=scheduler.max_tokens,
        enable_chunked_prefill=vllm_config.scheduler_config.enable_chunked_prefill,
        can_score_prompts=not config.materialize_only_last_token_logits,
    )
    assert config.seed is not None, "make_engine has drawn one"
    inputs = CheckedInputProcessor(
        limits=limits,
        tokenizer=tokenizer,
        end_ids=end_ids(directory, tokenizer),
        block_size=scheduler.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        seed=config.seed,
    )
    drafts = vllm_config.speculative_config is not None
    inputs.check_params = partial(
        check_params,
        logprobs_mode=model.logprobs_mode,
        must_be_greedy=drafts and vllm_config.device_config.device_type == "cpu",
    )
    return inputs
