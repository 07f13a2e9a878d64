"""Requests for users, from records, errors and streams; reports of a fleet's engines merged."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import torch

from rollout.control.reports import ResumeReport, SuspendReport, WeightUpdateReport
from rollout.coordinator.client.streams import RequestFuture, RequestStream
from rollout.coordinator.protocol.token_runs import TokenRun
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
from rollout.sampling_params import SamplingParams
from rollout.text import Prompt, Tokenizer, encode_prompt

# {"state", "weights_version", "weights_checksum", "ranks": {rank: report}, "lost_ranks"}, as a
# coordinator answers.
Results = Mapping[str, Any]
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


# ---- reports of a fleet's engines, as one report


def suspend_report(results: Results) -> SuspendReport:
    """Return sums of bytes and requests over the engines, and the longest time: they work in
    parallel."""
    return SuspendReport(**_together(results))


def resume_report(results: Results) -> ResumeReport:
    """As `suspend_report`."""
    return ResumeReport(**_together(results))


def weight_update_report(results: Results, seconds: float) -> WeightUpdateReport:
    """`seconds`: as the caller saw it. `num_bytes` of one engine, and the longest stall of any."""
    reports = _of_ranks(results)
    return WeightUpdateReport(
        version=results["weights_version"],
        seconds=seconds,
        stall_seconds=max((r["stall_seconds"] for r in reports), default=0.0),
        num_bytes=max((r["num_bytes"] for r in reports), default=0),
        checksum=next((r["checksum"] for r in reports), ""),
    )


def _of_ranks(results: Results) -> Sequence[Mapping[str, Any]]:
    """Return the reports; engines that were in the target state already have none."""
    return [report for report in results["ranks"].values() if report]


def _together(results: Results) -> dict[str, Any]:
    together: dict[str, Any] = {"mode": ""}
    for report in _of_ranks(results):
        for name, value in report.items():
            if isinstance(value, str):
                together[name] = value
            elif isinstance(value, Mapping):
                together[name] = dict(Counter(together.get(name, {})) + Counter(value))
            elif name == "seconds":
                together[name] = max(together.get(name, 0.0), value)
            else:
                together[name] = together.get(name, 0) + value
    return together
