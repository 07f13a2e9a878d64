"""Tables of the fields of verl's RolloutConfig: used, without effect, or refused.

Used when a replica starts. The tables hold every field of verl 0.9.1.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rollout.errors import ConfigError
from rollout.foreign_settings import RefusedSetting, unknown_changes

logger = logging.getLogger(__name__)
# Key of rollout.engine_kwargs that holds fields of InferenceConfig.
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

_SAY_BUFFER = "set engine_kwargs.rollout.buffer_size_gb, an amount; this field is then ignored"

REFUSED: Mapping[str, RefusedSetting] = {
    "pipeline_model_parallel_size": RefusedSetting((1,), "use tensor_model_parallel_size"),
    "expert_parallel_size": RefusedSetting(
        (1, None), "tensor_model_parallel_size divides the experts, too; leave it at 1"
    ),
    "moe_tensor_parallel_size": RefusedSetting(
        (1, None), "tensor_model_parallel_size divides the experts, too; leave it at 1"
    ),
    # Both defaults of verl: 0.5, and null.
    "gpu_memory_utilization": RefusedSetting((0.5,), _SAY_BUFFER),
    "standalone_gpu_memory_utilization": RefusedSetting((None,), _SAY_BUFFER),
    "cudagraph_capture_sizes": RefusedSetting(
        (None, []), "give engine_kwargs.rollout.num_cuda_graphs, their number"
    ),
    "quantization": RefusedSetting((None,), "the engine reads quantised checkpoints; leave it out"),
    "quantization_config_file": RefusedSetting((None,), "leave it out"),
    "limit_images": RefusedSetting((None,), "the engine has models of text only; leave it out"),
    "over_sample_rate": RefusedSetting(
        (0.0,), "it aborts the slowest requests of SGLang; leave it at 0"
    ),
    "load_format": RefusedSetting(
        ("dummy", "auto", "safetensors"), "the engine reads safetensors; leave it out"
    ),
    "scheduling_policy": RefusedSetting(
        ("fcfs", "priority", None), "requests run by priority, then as they came; use 'fcfs'"
    ),
}

# Fields without an effect on this backend, by reason.
NO_EFFECT: Mapping[str, frozenset[str]] = {
    "verl sends them with each request": frozenset(
        {"temperature", "top_k", "top_p", "do_sample", "n", "val_kwargs", "calculate_log_probs"}
    ),
    "verl's own choice of backend, places and client": frozenset(
        {
            *("name", "mode", "nnodes", "n_gpus_per_node", "checkpoint_manager_class"),
            *("router_config_path", "multi_stage_wake_up", "custom"),
        }
    ),
    "Hydra's class of the settings": frozenset({"_target_"}),
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
    "refused by a field of their own, checked apart": frozenset({"mtp", "qat", "disaggregation"}),
}
_KNOWN = frozenset().union(USED, REFUSED, *NO_EFFECT.values())


def check_config(config: Any) -> None:
    """Raise ConfigError for fields of a RolloutConfig that an engine cannot follow.

    Logs a warning for changed fields of a newer verl, which are not in the tables.
    """
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
    """Raise ConfigError for an HFModelConfig whose LoRA adapter verl would push on its own."""
    lora = getattr(model_config, "lora", None) or {}
    rank = getattr(model_config, "lora_rank", 0) or lora.get("rank", 0)
    if rank and not lora.get("merge", False):
        raise ConfigError(
            f"a LoRA adapter of rank {rank} that is pushed on its own is not supported; set "
            "actor_rollout_ref.model.lora.merge=True, which pushes the merged weights"
        )


def _is_on(part: Any, name: str) -> bool:
    """Return whether `part` of the config, a mapping, a dataclass or None, has this switch on."""
    value = part.get(name) if isinstance(part, Mapping) else getattr(part, name, False)
    return bool(value)
