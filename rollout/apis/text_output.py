"""From a finished record, or the error that left none, to the request a user gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch

from rollout.apis.prompts import Prompt
from rollout.coordinator.protocol.token_runs import TokenRun
from rollout.errors import InvalidRequestError
from rollout.generated_text import StreamedText
from rollout.record_text import add_text
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import Status
from rollout.sampling_params import SamplingParams
from rollout.text import Tokenizer


def finished_request(
    record: DynamicInferenceRequestRecord, tokenizer: Tokenizer | None
) -> DynamicInferenceRequest:
    """The whole history as one request; `generated_text` is set if there is a tokenizer."""
    add_text(record, tokenizer)
    request = record.merge()
    params = request.sampling_params
    assert params is not None, "engines take no request without"
    if not params.return_prompt_tokens:
        _drop_prompt(request)
    return request


def failed_request(
    request_id: int,
    prompt: Prompt,
    params: SamplingParams,
    error: Exception,
    tokenizer: Tokenizer | None,
) -> DynamicInferenceRequest:
    """A FAILED request with the error, for one that has no record."""
    request = DynamicInferenceRequest(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_tokens=torch.tensor(_ids_of(prompt, tokenizer), dtype=torch.int64),
        sampling_params=params,
        status=Status.FAILED,
    )
    request.finish_reason = "error"
    request.add_event_error_nontransient(error)
    request.add_event_fail()
    return request


def _ids_of(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """None of a text that the tokenizer fails on, which may be why its request failed."""
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]  # of arrays of any kind
    with suppress(Exception):
        if tokenizer is not None:
            return tokenizer.encode(prompt)
    return []


def text_to_stream(tokenizer: Tokenizer | None, params: SamplingParams) -> StreamedText:
    """What follows the text of a request's tokens. Raises InvalidRequestError."""
    if tokenizer is None:
        raise InvalidRequestError("as_text=True needs a tokenizer, and there is none")
    return StreamedText(tokenizer, params)


def streamed(
    item: TokenRun | DynamicInferenceRequestRecord,
    tokenizer: Tokenizer | None,
    text: StreamedText | None,
) -> Iterator[list[int] | str | DynamicInferenceRequest]:
    """What a user gets of an item of a stream: tokens, or their text if it is followed."""
    if isinstance(item, TokenRun):
        ids = item.token_ids.tolist()
        piece = ids if text is None else text.push(ids)
        if piece:
            yield piece
        return
    request = finished_request(item, tokenizer)
    if text is not None and (rest := text.finish(request.generated_text)):
        yield rest
    yield request


def _drop_prompt(request: DynamicInferenceRequest) -> None:
    """Keep only the generated positions; staleness tensors then cover those alone."""
    start, end = len(request.prompt_tokens), request.num_tokens
    request.precomputed_block_hashes = request.precomputed_block_hashes  # read while it is here
    request.prompt_tokens = torch.empty(0, dtype=torch.int64)
    request.policy_spans = request.policy_spans.slice(start, end)
    request.kv_spans = request.kv_spans.slice(start, end)
