"""SamplingParams from the fields of a client, whose neutral values have many spellings."""

from __future__ import annotations

from typing import Any

from rollout.sampling_params import MIN_TEMPERATURE, SamplingParams
from rollout.serve.errors import ApiError
from rollout.serve.schemas import SamplingFields
from rollout.serve.state import ServerState

# No vocabulary is so large: 100000000 and 1 << 30 are how some clients switch top_k off.
_NO_TOP_K = 2**20
# Field -> values that change nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}


def sampling_params_of(
    fields: SamplingFields,
    state: ServerState,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
    with_ranks: bool = False,
    cache_salt: str | None = None,
) -> SamplingParams:
    """Return the parameters of one sample.

    max_tokens: None is as many as the context takes. num_logprobs: alternatives reported with each
    generated token; 0 the token's own log-prob alone, None nothing. num_prompt_logprobs: the same
    for tokens of the prompt. with_ranks: whether ranks are reported, too. cache_salt: see
    SamplingParams. Raises ApiError and InvalidRequestError for values out of range, and fields that
    are not supported.
    """
    _refuse_unsupported(fields)
    num_prompt = num_prompt_logprobs
    for name, number in (("logprobs", num_logprobs), ("prompt_logprobs", num_prompt)):
        if number is not None and not 0 <= number <= state.config.max_logprobs:
            raise ApiError(
                400, f"{name}={number} must be in [0, {state.config.max_logprobs}]", param=name
            )
    return SamplingParams(
        **_draw_of(fields),
        num_tokens_to_generate=max_tokens,
        min_tokens=fields.min_tokens or 0,
        stop_words=_stop_words(fields.stop),
        stop_token_ids=fields.stop_token_ids or None,
        ignore_eos=bool(fields.ignore_eos),
        detokenize_stop_sequence=bool(fields.include_stop_str_in_output),
        return_log_probs=num_logprobs is not None,
        skip_prompt_log_probs=num_prompt is None,
        top_n_logprobs=max(num_logprobs or 0, num_prompt or 0),
        logprobs_mode=state.config.logprobs_mode,
        return_ranks=with_ranks,
        cache_salt=cache_salt,
    )


def _draw_of(fields: SamplingFields) -> dict[str, Any]:
    """Return the parameters of the draw itself."""
    temperature = 1.0 if fields.temperature is None else fields.temperature
    top_p = 1.0 if fields.top_p is None else fields.top_p
    if top_p <= 0:
        raise ApiError(400, f"top_p={top_p} must be in (0, 1]", param="top_p")
    top_k = fields.top_k or 0
    if top_k < -1:
        raise ApiError(400, f"top_k={top_k} must be at least 1, or 0 or -1 for off", param="top_k")
    return {
        "temperature": 0.0 if 0 < temperature < MIN_TEMPERATURE else temperature,
        "top_p": 0.0 if top_p == 1.0 else top_p,
        "top_k": top_k if 0 < top_k < _NO_TOP_K else 0,
        "min_p": fields.min_p or 0.0,
        "seed": fields.seed,
        "repetition_penalty": _or(fields.repetition_penalty, 1.0),
        "presence_penalty": _or(fields.presence_penalty, 0.0),
        "frequency_penalty": _or(fields.frequency_penalty, 0.0),
        "logit_bias": fields.logit_bias or None,
        "allowed_token_ids": fields.allowed_token_ids,
    }


def _or(value: float | None, neutral: float) -> float:
    return neutral if value is None else value


def _stop_words(stop: str | list[str] | None) -> list[str] | None:
    words = [stop] if isinstance(stop, str) else stop or []
    return [word for word in words if word] or None


def _refuse_unsupported(fields: SamplingFields) -> None:
    for name, neutral in _REFUSED.items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name}={value!r} is not supported", param=name)


def check_length(state: ServerState, num_prompt: int, max_tokens: int | None) -> None:
    """Raise ApiError for a prompt and an output that are longer than the context together."""
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
