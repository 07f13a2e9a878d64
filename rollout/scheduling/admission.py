"""Checks a request before it is queued, and finds its maximum length.

`rollout.engine.input_processor` calls the checks. `rollout.engine.build` and `rollout_vllm.engine`
create the AdmissionLimits. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from rollout.errors import (
    BlockOverflowError,
    ContextOverflowError,
    InvalidRequestError,
    MaxSequenceLengthOverflowError,
    TokenLimitClamped,
    TokenOverflowError,
)
from rollout.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Limits of an engine. Lengths are in tokens.

    can_score_prompts: whether the engine computes logits of prompt tokens, for prompt log-probs.
    """

    vocab_size: int
    max_sequence_length: int
    max_pool_tokens: int
    max_tokens_per_step: int
    enable_chunked_prefill: bool
    can_score_prompts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Result of `admit`.

    max_length: maximum number of tokens in prompt and output together.
    error: the reason why the request can never run on this engine; None if it can run.
    clamped: the reason why the request gets fewer tokens than it asks for; None if it gets all of
        them.
    """

    max_length: int
    error: ContextOverflowError | None = None
    clamped: TokenLimitClamped | None = None


def check_well_formed(
    prompt_tokens: Tokens[int], params: SamplingParams, limits: AdmissionLimits
) -> None:
    """Raise InvalidRequestError if prompt or params are malformed or do not fit the model or each
    other. Also raise it for prompt log-probs if the engine cannot score prompts."""
    if not len(prompt_tokens):
        raise InvalidRequestError("the prompt is empty; give it at least one token")
    low, high = min(prompt_tokens), max(prompt_tokens)
    if low < 0 or high >= limits.vocab_size:
        culprit = low if low < 0 else high
        raise InvalidRequestError(
            f"token id {culprit} is outside the model's vocabulary [0, {limits.vocab_size}); "
            "was the prompt encoded with another tokenizer?"
        )
    total = params.num_tokens_total
    if total is not None and total <= len(prompt_tokens):
        raise InvalidRequestError(
            f"num_tokens_total={total} leaves no token to generate after a prompt of "
            f"{len(prompt_tokens)}; raise it, or set num_tokens_to_generate instead"
        )
    if total is not None and params.min_tokens > total - len(prompt_tokens):
        raise InvalidRequestError(
            f"min_tokens={params.min_tokens} is more than num_tokens_total={total} leaves after a "
            f"prompt of {len(prompt_tokens)}; lower min_tokens, or raise num_tokens_total"
        )
    if not params.skip_prompt_log_probs and not limits.can_score_prompts:
        raise InvalidRequestError(
            "skip_prompt_log_probs=False needs logits of every prompt token; make the engine with "
            "InferenceConfig(materialize_only_last_token_logits=False)"
        )
    if params.top_n_logprobs > limits.vocab_size:
        raise InvalidRequestError(
            f"top_n_logprobs={params.top_n_logprobs} is more than the vocabulary "
            f"({limits.vocab_size})"
        )


def admit(
    request_id: int, num_prompt: int, params: SamplingParams, limits: AdmissionLimits
) -> Admission:
    """Return the maximum length of a well-formed request, or the reason why it can never run.
    `num_prompt` is the number of prompt tokens. The last new token needs no KV."""
    error = _impossible(request_id, num_prompt, limits)
    if error is not None:
        return Admission(max_length=num_prompt, error=error)
    fits = min(limits.max_sequence_length, limits.max_pool_tokens + 1)
    wanted = params.num_tokens_total
    if params.num_tokens_to_generate is not None:
        wanted = num_prompt + params.num_tokens_to_generate
    if wanted is None or wanted <= fits:
        return Admission(max_length=fits if wanted is None else wanted)
    message = (
        f"{wanted - num_prompt} new tokens were asked for after a prompt of {num_prompt}, but "
        f"max_sequence_length={limits.max_sequence_length} and a pool of "
        f"{limits.max_pool_tokens} tokens leave {fits - num_prompt}"
    )
    return Admission(max_length=fits, clamped=TokenLimitClamped(request_id, message))


def _impossible(
    request_id: int, num_prompt: int, limits: AdmissionLimits
) -> ContextOverflowError | None:
    if num_prompt >= limits.max_sequence_length:
        return MaxSequenceLengthOverflowError(
            request_id,
            f"a prompt of {num_prompt} tokens leaves no room in max_sequence_length="
            f"{limits.max_sequence_length}; shorten it or raise the limit",
        )
    if num_prompt > limits.max_pool_tokens:
        return BlockOverflowError(
            request_id,
            f"a prompt of {num_prompt} tokens is more than the whole KV pool holds "
            f"({limits.max_pool_tokens}); raise buffer_size_gb",
            is_transient=False,
        )
    if num_prompt > limits.max_tokens_per_step and not limits.enable_chunked_prefill:
        return TokenOverflowError(
            request_id,
            f"a prompt of {num_prompt} tokens does not fit one step (max_tokens="
            f"{limits.max_tokens_per_step}); set enable_chunked_prefill=True",
            is_transient=False,
        )
    return None
