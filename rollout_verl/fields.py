"""Checks verl's RolloutConfig by tables of its fields: used, refused or without effect.

Used by `rollout_verl.replica` before it starts the actor, and by `rollout_verl.settings`. The
tables have every field of verl 0.9.1.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rollout.errors import ConfigError
from rollout.foreign_settings import RefusedSetting, unknown_changes

logger = logging.getLogger(__name__)
# Fields of InferenceConfig are given in rollout.engine_kwargs under this key.
ENGINE_KWARGS = "rollout"

USED = frozenset(
    {
        # the engine's settings
        *("data_parallel_size", "tensor_model_parallel_size", "dtype", "seed", "full_determinism"),
        *("max_model_len", "prompt_length", "response_length", "max_num_seqs"),
        *("max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching"),
        *("enforce_eager", "enable_rollout_routing_replay", "engine_kwargs"),
        # requests, memory and weights
        *("repetition_penalty", "ignore_eos", "logprobs_mode", "free_cache_engine"),
        "checkpoint_engine",
    }
)

_SAY_BUFFER = "set engine_kwargs.rollout.buffer_size_gb; this field is then ignored"

REFUSED: Mapping[str, RefusedSetting] = {
    "pipeline_model_parallel_size": RefusedSetting((1,), "use tensor_model_parallel_size"),
    "expert_parallel_size": RefusedSetting(
        (1, None), "tensor_model_parallel_size divides the experts, too; leave it at 1"
    ),
    "moe_tensor_parallel_size": RefusedSetting(
        (1, None), "tensor_model_parallel_size divides the experts, too; leave it at 1"
    ),
    # The accepted values of the next two fields are verl's defaults.
    "gpu_memory_utilization": RefusedSetting((0.5,), _SAY_BUFFER),
    "standalone_gpu_memory_utilization": RefusedSetting((None,), _SAY_BUFFER),
    "cudagraph_capture_sizes": RefusedSetting(
        (None, []), "set engine_kwargs.rollout.num_cuda_graphs to their number"
    ),
    "quantization": RefusedSetting((None,), "the engine reads quantised checkpoints; leave it out"),
    "quantization_config_file": RefusedSetting((None,), "leave it out"),
    "limit_images": RefusedSetting((None,), "the engine has only text models; leave it out"),
    "over_sample_rate": RefusedSetting(
        (0.0,), "the engine does not abort the slowest requests; leave it at 0"
    ),
    "load_format": RefusedSetting(
        ("dummy", "auto", "safetensors"), "the engine reads safetensors; leave it out"
    ),
    "scheduling_policy": RefusedSetting(
        ("fcfs", "priority", None), "requests run by priority, then in order of arrival; use 'fcfs'"
    ),
}

# Fields without an effect on this backend, by reason.
NO_EFFECT: Mapping[str, frozenset[str]] = {
    "verl sends these values with each request": frozenset(
        {"temperature", "top_k", "top_p", "do_sample", "n", "val_kwargs", "calculate_log_probs"}
    ),
    "verl's own choice of backend, places and client": frozenset(
        {
            *("name", "mode", "nnodes", "n_gpus_per_node", "checkpoint_manager_class"),
            *("router_config_path", "multi_stage_wake_up", "custom"),
        }
    ),
    "the class that Hydra makes of the settings": frozenset({"_target_"}),
    "verl's agent loops": frozenset({"agent", "multi_turn", "trace"}),
    "the actor's log-probs": frozenset(
        {
            *("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"),
            *("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
        }
    ),
    "how verl's other backends gather weights or start": frozenset(
        {
            *("layered_summon", "layer_name_map", "sglang_engine_mode", "server"),
            *("skip_tokenizer_init", "enable_sleep_mode"),
        }
    ),
    "statistics: /metrics of the server always has them, profilers do not reach the engines": (
        frozenset(
            {"disable_log_stats", "prometheus", "profiler", "moe_load_balance_metrics_interval"}
        )
    ),
    "checked by one of their own fields in check_config": frozenset(
        {"mtp", "qat", "disaggregation"}
    ),
}
_KNOWN = frozenset().union(USED, REFUSED, *NO_EFFECT.values())


def check_config(config: Any) -> None:
    """Raise ConfigError if a RolloutConfig asks for something that this backend does not support.
    Logs a warning for changed fields that the tables lack."""
    own = (config.engine_kwargs or {}).get(ENGINE_KWARGS) or {}
    for name, refused in REFUSED.items():
        value = getattr(config, name, None)
        if not refused.is_asked_by(value):
            continue
        if refused.remedy != _SAY_BUFFER or "buffer_size_gb" not in own:
            raise ConfigError(f"rollout.{name}={value!r} is not supported: {refused.remedy}")
    if _is_on(config.disaggregation, "enabled"):
        raise ConfigError("rollout.disaggregation.enabled=True is not supported; leave it False")
    if _is_on(config.mtp, "enable") and _is_on(config.mtp, "enable_rollout"):
        raise ConfigError(
            "rollout.mtp.enable_rollout=True is not supported: the engine has no speculative "
            "decoding; leave it False"
        )
    if _is_on(config.qat, "enable"):
        raise ConfigError(
            "rollout.qat.enable=True is not supported: the engine has no kernels of quantisation-"
            "aware training; switch it off"
        )
    foreign = [key for key, value in (config.engine_kwargs or {}).items() if value]
    if foreign := [key for key in foreign if key != ENGINE_KWARGS]:
        raise ConfigError(
            f"rollout.engine_kwargs.{foreign[0]} is for another backend; put fields of "
            f"InferenceConfig under rollout.engine_kwargs.{ENGINE_KWARGS}"
        )
    if new := unknown_changes(config, _KNOWN):
        logger.warning("RolloutConfig has fields that this backend does not know: %s", new)


def check_model_config(model_config: Any) -> None:
    """Raise ConfigError if an HFModelConfig makes verl push a LoRA adapter without merging it."""
    lora = getattr(model_config, "lora", None) or {}
    rank = getattr(model_config, "lora_rank", 0) or lora.get("rank", 0)
    if rank and not lora.get("merge", False):
        raise ConfigError(
            f"a LoRA adapter of rank {rank} that is pushed without merging is not supported; set "
            "actor_rollout_ref.model.lora.merge=True"
        )


def _is_on(part: Any, name: str) -> bool:
    """Return whether the field `name` of `part` is true. `part` is a mapping, a dataclass or
    None."""
    value = part.get(name) if isinstance(part, Mapping) else getattr(part, name, False)
    return bool(value)
