"""Converts verl's settings to keywords of AsyncLLM, and its request parameters to SamplingParams.

Used by `rollout_verl.server`. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import InvalidRequestError
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import mix_seed
from rollout_verl.fields import ENGINE_KWARGS, check_config

_LIMITS = ("max_tokens", "max_new_tokens")
_PASSED_ON = (
    *("temperature", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "allowed_token_ids"),
)
_CONVERTED = ("top_k", "top_p", "stop", "logprobs")
# These settings change only the text, but verl reads token ids.
_WITHOUT_EFFECT = frozenset(
    {
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        "include_stop_str_in_output",
    }
)
# The only accepted values of these settings. verl sends one request per sample.
_NEUTRAL: Mapping[str, Any] = {"n": 1, "best_of": 1, "do_sample": True}


def engine_fields(config: Any, replica_rank: int) -> dict[str, Any]:
    """Return the keywords of AsyncLLM for a RolloutConfig. Raises ConfigError for unsupported
    settings. Each replica's seed is derived from `rollout.seed` and the replica's rank. Fields of
    InferenceConfig in `rollout.engine_kwargs.rollout`, such as buffer_size_gb, replace the
    converted ones."""
    check_config(config)
    fields = {
        "data_parallel_size": config.data_parallel_size,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "dtype": config.dtype,
        "seed": None if config.seed is None else mix_seed(config.seed, replica_rank),
        "max_sequence_length": max_model_len(config),
        "max_requests": config.max_num_seqs,
        "max_tokens": config.max_num_batched_tokens,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "record_routing": config.enable_rollout_routing_replay,
        "deterministic": config.full_determinism,
    }
    if config.enforce_eager:
        fields["num_cuda_graphs"] = 0
    return fields | dict((config.engine_kwargs or {}).get(ENGINE_KWARGS) or {})


def max_model_len(config: Any) -> int:
    """Return the most tokens of prompt and response together."""
    return int(config.max_model_len or config.prompt_length + config.response_length)


def sampling_params_of(
    given: Mapping[str, Any], config: Any, num_prompt_tokens: int
) -> SamplingParams:
    """Return the SamplingParams of one request. `given` has the parameters that verl's agent loops
    send. The log-prob mode and values that are not `given` come from the RolloutConfig `config`.
    Raises InvalidRequestError for an unsupported parameter, and for a prompt that leaves no room to
    generate."""
    room = max_model_len(config) - num_prompt_tokens
    if room < 1:
        raise InvalidRequestError(
            f"a prompt of {num_prompt_tokens} tokens leaves no room to generate within "
            f"{max_model_len(config)}; raise rollout.max_model_len"
        )
    given = {name: value for name, value in given.items() if value is not None}
    for name in sorted(set(given) - {*_LIMITS, *_PASSED_ON, *_WITHOUT_EFFECT, *_CONVERTED}):
        if name not in _NEUTRAL or given[name] != _NEUTRAL[name]:
            raise InvalidRequestError(
                f"sampling parameter {name}={given[name]!r} is not supported; leave it out"
            )
    limits = [given[name] for name in _LIMITS if name in given]
    both = config.prompt_length + config.response_length
    default = min(config.response_length, both - num_prompt_tokens)
    defaults = {name: getattr(config, name) for name in ("repetition_penalty", "ignore_eos")}
    fields = defaults | {name: given[name] for name in _PASSED_ON if name in given}
    return SamplingParams(
        **fields,
        # verl disables these by -1 and 1.0.
        top_k=0 if given.get("top_k", -1) == -1 else given["top_k"],
        top_p=0.0 if given.get("top_p", 1.0) == 1.0 else given["top_p"],
        stop_words=given.get("stop") or None,
        num_tokens_to_generate=max(1, min(limits[0] if limits else default, room)),
        # 0 requests the log-prob of the sampled token only.
        return_log_probs=given.get("logprobs") not in (None, False),
        logprobs_mode="processed" if config.logprobs_mode == "processed_logprobs" else "raw",
    )
