"""Makes SamplingParams from the fields of a request, and checks lengths against the context.

Used by `rollout.serve.openai` (chat, completions, reply, tokens_in_out) and
`rollout.serve.sglang.generate`. All functions are pure.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from rollout.sampling_params import MIN_TEMPERATURE, SamplingParams
from rollout.serve.errors import ApiError
from rollout.serve.generation_config import SamplingDefaults
from rollout.serve.schemas import ReplyFields, SamplingFields
from rollout.serve.state import ServerState

_T = TypeVar("_T", int, float)
# Larger than any vocabulary. Some clients switch top_k off by 100000000 or 1 << 30.
_NO_TOP_K = 2**20


def sampling_params_of(
    fields: SamplingFields,
    state: ServerState,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
    with_ranks: bool = False,
    cache_salt: str | None = None,
    defaults: SamplingDefaults | None = None,
) -> SamplingParams:
    """Return the parameters of one sample.

    max_tokens: most generated tokens. None allows as many as fit into the context.
    num_logprobs: alternatives reported with each generated token. 0 reports only the token's own
        log-prob, None no log-probs.
    num_prompt_logprobs: alternatives reported with each prompt token, as `num_logprobs`.
    with_ranks: whether token ranks are reported.
    cache_salt: see SamplingParams.
    defaults: values of fields that the request leaves out. None takes the server's defaults.

    Raises ApiError and InvalidRequestError for values out of range.
    """
    num_prompt = num_prompt_logprobs
    for name, number in (("logprobs", num_logprobs), ("prompt_logprobs", num_prompt)):
        if number is not None and not 0 <= number <= state.config.max_logprobs:
            raise ApiError(
                400, f"{name}={number} must be in [0, {state.config.max_logprobs}]", param=name
            )
    interval = _or(fields.stream_interval, 1)
    if interval < 1:
        raise ApiError(
            400, f"stream_interval={interval} must be at least 1", param="stream_interval"
        )
    return SamplingParams(
        **_draw_of(fields, defaults or state.sampling_defaults),
        num_tokens_to_generate=max_tokens,
        min_tokens=fields.min_tokens or 0,
        stop_words=_stop_words(fields.stop),
        stop_token_ids=fields.stop_token_ids or None,
        ignore_eos=bool(fields.ignore_eos),
        detokenize_stop_sequence=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
        return_log_probs=num_logprobs is not None,
        skip_prompt_log_probs=num_prompt is None,
        top_n_logprobs=max(num_logprobs or 0, num_prompt or 0),
        logprobs_mode=state.config.logprobs_mode,
        return_ranks=with_ranks,
        cache_salt=cache_salt,
        streaming_interval=interval,
    )


def _draw_of(fields: SamplingFields, defaults: SamplingDefaults) -> dict[str, Any]:
    """Return the SamplingParams fields that choose a token, with 0 for "off" in top_p and top_k.
    Raises ApiError for a top_p or top_k out of range."""
    temperature = _or(fields.temperature, defaults.temperature)
    top_p = _or(fields.top_p, defaults.top_p)
    if top_p <= 0:
        raise ApiError(400, f"top_p={top_p} must be in (0, 1]", param="top_p")
    top_k = _or(fields.top_k, defaults.top_k)
    if top_k < -1:
        raise ApiError(400, f"top_k={top_k} must be at least 1, or 0 or -1 for off", param="top_k")
    return {
        "temperature": 0.0 if 0 < temperature < MIN_TEMPERATURE else temperature,
        "top_p": 0.0 if top_p == 1.0 else top_p,
        "top_k": top_k if 0 < top_k < _NO_TOP_K else 0,
        "min_p": _or(fields.min_p, defaults.min_p),
        "seed": fields.seed,
        "repetition_penalty": _or(fields.repetition_penalty, defaults.repetition_penalty),
        "presence_penalty": _or(fields.presence_penalty, defaults.presence_penalty),
        "frequency_penalty": _or(fields.frequency_penalty, defaults.frequency_penalty),
        "logit_bias": fields.logit_bias or None,
        "allowed_token_ids": fields.allowed_token_ids,
    }


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _stop_words(stop: str | list[str] | None) -> list[str] | None:
    words = [stop] if isinstance(stop, str) else stop or []
    return [word for word in words if word] or None


def salt_of(cache_salt: str | None, extra_key: str | None) -> str | None:
    """Return one salt made of both arguments. Requests share cached prefixes only if both are
    equal."""
    return cache_salt if extra_key is None else json.dumps([cache_salt, extra_key])


def truncation_of(state: ServerState, fields: ReplyFields, max_tokens: int | None) -> slice | None:
    """Return the slice of a prompt that truncate_prompt_tokens keeps, or None for the whole prompt.
    The slice keeps the last tokens, or the first tokens if truncation_side is "right". A value of
    -1 keeps as many tokens as fit beside `max_tokens`, or beside one token if that is None. Raises
    ApiError for any other number out of range."""
    num_kept, longest = fields.truncate_prompt_tokens, state.max_model_len
    if num_kept is None:
        return None
    if num_kept == -1:
        num_kept = max(1, longest - max(1, max_tokens or 0))
    if not 1 <= num_kept <= longest:
        raise ApiError(
            400,
            f"truncate_prompt_tokens={num_kept} must be in [1, {longest}], or -1 for what fits",
            param="truncate_prompt_tokens",
        )
    return slice(num_kept) if fields.truncation_side == "right" else slice(-num_kept, None)


def default_max_tokens(state: ServerState, num_prompt: int) -> int | None:
    """Return the max_tokens of a request that gives none. None allows as many tokens as fit. The
    server's default is ignored if it does not fit into the context beside the prompt."""
    most = state.sampling_defaults.max_tokens
    return most if most is None or num_prompt + most <= state.max_model_len else None


def check_length(state: ServerState, num_prompt: int, max_tokens: int | None) -> None:
    """Raise ApiError if the prompt and `max_tokens` exceed the context. A `max_tokens` of None
    counts as one token."""
    longest = state.max_model_len
    wanted = max_tokens or 0
    if num_prompt + wanted <= longest - (max_tokens is None):
        return
    raise ApiError(
        400,
        f"This model's maximum context length is {longest} tokens. However, you requested {wanted} "
        f"output tokens and your prompt contains {num_prompt} input tokens, for a total of "
        f"{num_prompt + wanted} tokens. Please reduce the length of the input prompt or the number "
        "of requested output tokens.",
        param="input_tokens",
    )
