"""Translates settings: an InferenceConfig into vLLM's engine arguments, SamplingParams into vLLM's.

Used by `rollout_vllm.engine`, `rollout_vllm.scheduler` and `rollout_vllm.suspension`. A setting
that vLLM cannot follow is refused by name. Imports no vLLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rollout.config import InferenceConfig, KVCacheManagementMode
from rollout.errors import ConfigError, InvalidRequestError
from rollout.sampling_params import SamplingParams
from rollout.scheduling.stopping import StopRule

# Fields of InferenceConfig -> the argument of vLLM that follows them.
ARGUMENTS = {
    "block_size_tokens": "block_size",
    "max_sequence_length": "max_model_len",
    "max_requests": "max_num_seqs",
    "max_tokens": "max_num_batched_tokens",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "seed": "seed",
    "dtype": "dtype",
    "tensor_parallel_size": "tensor_parallel_size",
}
# Fields that the Engine and `rollout_vllm` follow themselves.
FOLLOWED = frozenset(
    {
        *ARGUMENTS,
        *("engine", "engine_options", "buffer_size_gb", "num_threads"),
        *("kv_cache_management_mode", "max_kv_staleness_versions", "enable_prefix_caching"),
        *("prefix_reuse_across_versions", "prefix_caching_coordinator_policy"),
        *("materialize_only_last_token_logits", "reject_non_finite_weights", "device"),
        *("track_generated_token_events", "metrics_writer", "logging_step_interval"),
        *("request_metadata_types", "mamba_memory_ratio", "mamba_inference_state_config"),
    }
)
# What a user who sets one of the other fields should do.
REMEDIES = {
    "deterministic": "vLLM's batch-invariant kernels are switched on by VLLM_BATCH_INVARIANT=1",
    "num_cuda_graphs": "use engine_options={'compilation_config': ...}",
    "static_kv_memory_pointers": "vLLM's KV cache keeps its addresses; leave the field out",
    "memory_kind": "use engine_options={'enable_sleep_mode': True}",
    "pg_collection": "vLLM starts its own ranks: tensor_parallel_size",
}
# Arguments of vLLM that this package sets, with the reason.
OWN_ARGUMENTS = {
    "model": "it is the model of LLM",
    "scheduler_cls": "KV is stamped with versions by a scheduler of this package",
    "enable_prefix_caching": "samples of a prompt share its prefill by it",
    "skip_tokenizer_init": "texts are encoded and decoded by this engine",
    "scheduling_policy": "requests have priorities",
    "disable_log_stats": "statistics are kept by this engine",
    "data_parallel_size": "several engines are a fleet: data_parallel_size of AsyncLLM",
    "kv_transfer_config": "KV of other engines has no version",
    "enable_return_routed_experts": "records do not take the experts that vLLM reports",
    "nnodes": "an update reaches the workers through files in this machine's memory",
    "max_loras": "one adapter at a time is merged into the weights",
    "max_lora_rank": "an adapter of any rank is merged into the weights",
}
EXECUTORS = (None, "uni", "mp")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


def engine_arguments(config: InferenceConfig) -> dict[str, Any]:
    """Return keywords of vLLM's EngineArgs, but for the model and the scheduler.

    Raises ConfigError for a field that vLLM cannot follow, and for an engine option that would
    break a promise of this engine or contradicts a field.
    """
    _check_fields(config)
    options = dict(config.engine_options)
    options.pop("enable_lora", None)  # the executor merges adapters
    for name, reason in OWN_ARGUMENTS.items():
        if name in options:
            raise ConfigError(f"engine_options[{name!r}] cannot be set: {reason}; leave it out")
    mode = options.setdefault("logprobs_mode", LOGPROBS_MODES[0])
    if mode not in LOGPROBS_MODES:
        raise ConfigError(
            f"engine_options['logprobs_mode']={mode!r} must be one of {LOGPROBS_MODES}: records "
            "hold log-probs"
        )
    if (executor := options.get("distributed_executor_backend")) not in EXECUTORS:
        raise ConfigError(
            f"engine_options['distributed_executor_backend']={executor!r} is not supported: an "
            "update reaches the workers through files in this machine's memory; use 'mp', or leave "
            "it out"
        )
    for name, theirs in ARGUMENTS.items():
        value, default = getattr(config, name), _default(name)
        if value == default:
            continue
        if theirs in options:
            raise ConfigError(
                f"engine_options[{theirs!r}]={options[theirs]!r} and {name}={value!r} say the "
                "same; give only one"
            )
        options[theirs] = value
    if config.buffer_size_gb is not None:
        options["kv_cache_memory_bytes"] = int(config.buffer_size_gb * 2**30)
    options.setdefault("enforce_eager", config.device == "cpu")
    options.setdefault("async_scheduling", False)
    return {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        **options,
    }


def _check_fields(config: InferenceConfig) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in FOLLOWED and value != _default(field.name):
            shown = getattr(value, "value", value)
            remedy = REMEDIES.get(field.name, "leave it out, or use engine='rollout'")
            raise ConfigError(f"{field.name}={shown!r} does not work with engine='vllm': {remedy}")
    check_mode(
        config.kv_cache_management_mode,
        "kv_cache_management_mode",
        has_sleep=bool(config.engine_options.get("enable_sleep_mode")),
    )


def check_mode(mode: KVCacheManagementMode, argument: str, *, has_sleep: bool) -> None:
    """Raise ConfigError, naming the argument, for a KV mode that this engine does not have.
    `has_sleep`: vLLM's enable_sleep_mode."""
    if mode is KVCacheManagementMode.OFFLOAD and not has_sleep:
        raise ConfigError(
            f"{argument}={mode.value!r} with engine='vllm' needs vLLM's sleep mode, on CUDA: "
            "engine_options={'enable_sleep_mode': True}; use 'persist' or 'recompute' here"
        )


def _default(name: str) -> Any:
    return InferenceConfig.__dataclass_fields__[name].default


def check_params(
    params: SamplingParams, logprobs_mode: str, *, must_be_greedy: bool = False
) -> None:
    """Raise InvalidRequestError if vLLM, with this mode of log-probs for all requests, cannot
    report what the request asks for, or if `must_be_greedy` and it is sampled."""
    if must_be_greedy and params.temperature:
        raise InvalidRequestError(
            f"temperature={params.temperature} does not work with speculative_config on a CPU: "
            "vLLM 0.32 verifies drafts with wrong temperatures there; use temperature=0, or leave "
            "speculative_config out"
        )
    if params.return_log_probs and not _has_mode(params, logprobs_mode):
        raise InvalidRequestError(
            f"logprobs_mode={params.logprobs_mode!r} cannot be reported: vLLM has one mode for all "
            f"requests, here {logprobs_mode!r}; make the engine with "
            f"engine_options={{'logprobs_mode': {_other(logprobs_mode)!r}}}, or sample without "
            "temperature, truncation, penalties and biases"
        )


def _other(mode: str) -> str:
    return LOGPROBS_MODES[1 - LOGPROBS_MODES.index(mode)]


def _has_mode(params: SamplingParams, logprobs_mode: str) -> bool:
    """Return whether vLLM's mode gives the log-probs that the request asks for. A greedy request
    gets the raw log-probs here, in every mode."""
    is_scaled = params.temperature not in (0.0, 1.0)
    is_changed = bool(
        (params.top_k or params.top_p not in (0.0, 1.0) or params.min_p)
        or (params.has_penalties or params.logit_bias)
        or (params.allowed_token_ids or params.min_tokens)
    )
    wanted = params.logprobs_mode if params.temperature else "raw"
    if logprobs_mode == LOGPROBS_MODES[0]:
        return wanted == "raw" or not (is_scaled or (wanted == "processed" and is_changed))
    return wanted == "processed" or not (is_changed or (wanted == "raw" and is_scaled))


def sampling_arguments(
    params: SamplingParams, num_new: int, rule: StopRule, *, wants_prompt_logprobs: bool
) -> Mapping[str, Any]:
    """Return keywords of vLLM's SamplingParams. `num_new`: most tokens to generate.

    Requests end by this engine's stop rule. vLLM gets the end tokens where it has to forbid them.
    """
    wants_top = params.return_log_probs or params.top_n_logprobs or params.return_ranks
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p or 1.0,
        "min_p": params.min_p,
        "seed": None if params.seed is None else params.seed % 2**63,
        "max_tokens": num_new,
        "min_tokens": min(params.min_tokens, num_new),
        "stop_token_ids": list(rule.end_ids) if params.min_tokens else None,
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": params.top_n_logprobs if wants_top else None,
        "prompt_logprobs": params.top_n_logprobs if wants_prompt_logprobs else None,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": dict(params.logit_bias) if params.logit_bias else None,
        "allowed_token_ids": list(params.allowed_token_ids) if params.allowed_token_ids else None,
    }
