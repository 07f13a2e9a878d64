"""Requests for users, from records, errors and streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

import torch

from rollout.coordinator.client.streams import RequestFuture, RequestStream
from rollout.errors import (
    ClientStateError,
    CoordinatorLostError,
    RequestAbortedError,
    RolloutError,
)
from rollout.generated_text import StreamedText, add_text
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import Status
from rollout.requests.token_runs import TokenRun
from rollout.sampling_params import SamplingParams
from rollout.text import Prompt, Tokenizer, encode_prompt

# Errors that fail all pending requests at once.
LOST = (CoordinatorLostError, ClientStateError)


def finished_request(
    record: DynamicInferenceRequestRecord, tokenizer: Tokenizer | None
) -> DynamicInferenceRequest:
    """Return the record merged into one request; with a tokenizer, `generated_text` is set."""
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
    """Return a FAILED request with the error, in place of one without a record.

    A request that is aborted before an engine has it has no record.
    """
    request = DynamicInferenceRequest(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_tokens=torch.tensor(_ids_of(prompt, tokenizer), dtype=torch.int64),
        sampling_params=params,
        status=Status.FAILED,
    )
    request.finish_reason = "abort" if isinstance(error, RequestAbortedError) else "error"
    request.add_event_error_nontransient(error)
    request.add_event_fail()
    return request


def _ids_of(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Return the prompt's ids; [] for a text that the tokenizer cannot encode."""
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]  # of arrays of any kind
    with suppress(Exception):  # the tokenizer is the user's: it may raise anything
        if tokenizer is not None:
            return encode_prompt(tokenizer, prompt)
    return []


def _drop_prompt(request: DynamicInferenceRequest) -> None:
    """Keep only the generated positions; staleness tensors then cover those alone."""
    start, end = len(request.prompt_tokens), request.num_tokens
    request.precomputed_block_hashes = request.precomputed_block_hashes  # read while it is here
    request.prompt_tokens = torch.empty(0, dtype=torch.int64)
    request.policy_spans = request.policy_spans.slice(start, end)
    request.kv_spans = request.kv_spans.slice(start, end)


# ---- streams


async def streamed_items(
    stream: RequestStream,
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    *,
    as_text: bool,
    cut_short: Callable[[], RolloutError | None],
) -> AsyncGenerator[list[int] | str | DynamicInferenceRequest, None]:
    """Yield token ids as they come, or pieces of text, then the request. See AsyncLLM.stream.

    cut_short: returns why pending calls get no answer, None if they may.
    """
    text = None
    if as_text and tokenizer is not None:
        text = StreamedText(tokenizer, params, stream.prompt_tokens)
    async with aclosing(stream):
        try:
            async for item in stream:
                if isinstance(item, TokenRun):
                    ids = item.token_ids.tolist()
                    if piece := ids if text is None else text.push(ids):
                        yield piece
                    continue
                request = finished_request(item, tokenizer)
                if text is not None and (rest := text.finish(request.generated_text)):
                    yield rest
                yield request
        except RequestAbortedError as error:  # before an engine had it
            if cut_short() is not None:
                raise
            yield failed_request(stream.request_id, prompt, params, error, tokenizer)


async def wait_for_requests(
    futures: Sequence[RequestFuture], *, cut_short: Callable[[], RolloutError | None]
) -> None:
    """Wait until all futures are done; if cancelled, abort the rest. Raises an error that fails all
    pending requests at once. cut_short: as for `streamed_items`.
    """
    try:
        if futures:
            await asyncio.wait(futures)
        for future in futures:
            error = future.exception()
            if isinstance(error, LOST) or (error is not None and cut_short()):
                raise error
    finally:
        for future in futures:
            future.cancel()  # those that are not done
