"""The parts of a reply that describe one sample: its tokens, log-probs, text and weights versions.

Used by `rollout.serve.openai` (chat, completions, logprobs, reply, tokens_in_out) and
`rollout.serve.sglang.generate`. The functions only read requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rollout.generated_text import StreamedText, shown_text
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.token_runs import TokenRun
from rollout.sampling_params import SamplingParams
from rollout.serve.state import ServerState
from rollout.text import Tokenizer

# vLLM's value for a log-prob of minus infinity, which JSON cannot express.
_LOWEST = -9999.0

Request = DynamicInferenceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenData:
    """Token ids, and for each token its log-prob, its rank and the most likely alternatives. A list
    is None if the client did not ask for it. An entry of a list is None if its value is unknown, as
    for the first token of a prompt."""

    token_ids: Sequence[int]
    log_probs: Sequence[float | None] | None = None
    ranks: Sequence[int | None] | None = None
    top: Sequence[dict[int, float] | None] | None = None

    def __add__(self, other: TokenData) -> TokenData:
        """Return these tokens followed by `other`. A list is None if it is None in either
        operand."""
        return TokenData(
            token_ids=[*self.token_ids, *other.token_ids],
            log_probs=_joined(self.log_probs, other.log_probs),
            ranks=_joined(self.ranks, other.ranks),
            top=_joined(self.top, other.top),
        )

    def each(self, num_top: int) -> list[tuple[int, float | None, int | None, dict[int, float]]]:
        """Return (id, log-prob, rank, alternatives) of each token. The alternatives are {id:
        log-prob} of the token itself and of the `num_top` most likely tokens. The token itself
        comes first and is not repeated."""
        count = len(self.token_ids)
        log_probs = self.log_probs or [None] * count
        ranks, top = self.ranks or [None] * count, self.top or [None] * count
        rows = zip(self.token_ids, log_probs, ranks, top, strict=True)
        return [(i, lp, rank, _top(i, lp, own, num_top)) for i, lp, rank, own in rows]


def _joined(first: Any, second: Any) -> Any:
    return None if first is None or second is None else [*first, *second]


def _top(
    token_id: int, log_prob: float | None, top: dict[int, float] | None, num_top: int
) -> dict[int, float]:
    if log_prob is None:
        return {}
    chosen = {token_id: log_prob}
    for key, value in islice((top or {}).items(), num_top):
        chosen.setdefault(key, value)
    return {key: finite(value) for key, value in chosen.items()}


def finite(log_prob: float) -> float:
    """Return `log_prob`, or -9999.0 if it is not finite."""
    return log_prob if math.isfinite(log_prob) else _LOWEST


def of_run(run: TokenRun) -> TokenData:
    return TokenData(
        token_ids=run.token_ids.tolist(),
        log_probs=None if run.log_probs is None else run.log_probs.tolist(),
        ranks=None if run.ranks is None else run.ranks.tolist(),
        top=None if run.top_n is None else run.top_n.rows(),
    )


def of_generated(request: Request) -> TokenData:
    log_probs = request.generated_log_probs
    return TokenData(
        token_ids=request.generated_tokens,
        log_probs=None if log_probs is None else list(map(float, log_probs)),
        ranks=request.generated_ranks,
        top=request.generated_top_n_logprobs,
    )


def of_prompt(request: Request) -> TokenData:
    """Return the TokenData of the prompt. Log-prob, rank and alternatives of its first token are
    None."""
    ids, log_probs = request.prompt_tokens.tolist(), request.prompt_log_probs
    count = len(ids) - 1

    def shifted(values: Any) -> list[Any] | None:
        return None if values is None else [None, *list(values)[:count]]

    return TokenData(
        token_ids=ids,
        log_probs=shifted(None if log_probs is None else map(float, log_probs)),
        ranks=shifted(request.prompt_ranks),
        top=shifted(request.prompt_top_n_logprobs),
    )


def text_of(
    state: ServerState,
    request: Request,
    *,
    with_special_tokens: bool,
    tokenizer: Tokenizer | None = None,
) -> str:
    """Return the text of a finished request, or "" if the LLM has no tokenizer. `tokenizer`
    replaces the LLM's tokenizer for decoding."""
    if tokenizer is None and with_special_tokens and state.llm.tokenizer is not None:
        tokenizer = state.texts.verbatim
    if tokenizer is None:
        return request.generated_text or ""
    params = request.sampling_params
    assert params is not None, "engines accept no request without parameters"
    return shown_text(
        tokenizer,
        request.generated_tokens,
        request.prompt_tokens,
        finish_reason=request.finish_reason,
        stop_word_ids=request.stop_word_ids,
        sampling_params=params.serialize(),
    )


def streamed_text(
    state: ServerState,
    params: SamplingParams,
    prompt: Sequence[int],
    *,
    with_special_tokens: bool,
    tokenizer: Tokenizer | None = None,
) -> StreamedText | None:
    """Return a StreamedText for the tokens after `prompt`, or None if the LLM has no tokenizer.
    `tokenizer` replaces the LLM's tokenizer for decoding."""
    if state.llm.tokenizer is None:
        return None
    if tokenizer is None:
        tokenizer = state.texts.verbatim if with_special_tokens else state.llm.tokenizer
    return StreamedText(tokenizer, params, prompt)


def weight_versions(
    state: ServerState, request: Request, num_tokens: int | None = None
) -> list[dict[str, Any]]:
    """Return [{"version": label, "start": ..., "end": ...}] for the first `num_tokens` generated
    tokens, or for all if it is None. Each entry is a run of tokens that weights of one label
    sampled."""
    start, end = len(request.prompt_tokens), request.num_tokens
    spans = request.stamped_policy_spans()
    return state.labels.runs(spans.slice(start, end if num_tokens is None else start + num_tokens))
