"""From a finished record to the request a user gets: merged, with its text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.text import Tokenizer


def finished_request(
    record: DynamicInferenceRequestRecord, tokenizer: Tokenizer | None
) -> DynamicInferenceRequest:
    """The whole history as one request; `generated_text` is set if there is a tokenizer.

    A stop word is left out of the text, not of the tokens, unless `detokenize_stop_sequence`.
    """
    request = record.merge()
    params = request.sampling_params
    assert params is not None, "engines take no request without"
    if tokenizer is not None:
        tokens = request.generated_tokens
        if request.finish_reason == "stop" and not params.detokenize_stop_sequence:
            tokens = _without_stop_word(tokens, request.stop_word_ids or [])
        request.generated_text = tokenizer.decode(tokens)
    if not params.return_prompt_tokens:
        _drop_prompt(request)
    return request


def _drop_prompt(request: DynamicInferenceRequest) -> None:
    """Keep only the generated positions; staleness tensors then cover those alone."""
    start, end = len(request.prompt_tokens), request.num_tokens
    request.precomputed_block_hashes = request.precomputed_block_hashes  # read while it is here
    request.prompt_tokens = torch.empty(0, dtype=torch.int64)
    request.policy_spans = request.policy_spans.slice(start, end)
    request.kv_spans = request.kv_spans.slice(start, end)


def _without_stop_word(tokens: Sequence[int], stop_words: Sequence[Sequence[int]]) -> list[int]:
    for word in stop_words:
        if list(tokens[-len(word) :]) == list(word):
            return list(tokens[: -len(word)])
    return list(tokens)
