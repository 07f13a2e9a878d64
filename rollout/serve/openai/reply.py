"""Parts of replies that completions, chat and tokens in and out share."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from rollout.coordinator.protocol.token_runs import TokenRun
from rollout.generated_text import StreamedText, shown_text
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.serve.errors import ApiError, ErrorForm, api_error_of, openai_form
from rollout.serve.event_stream import EventStream
from rollout.serve.generation import Generation
from rollout.serve.schemas import ReplyFields, SamplingFields, StreamOptions
from rollout.serve.state import STATE, ServerState

Request = DynamicInferenceRequest

_logger = logging.getLogger(__name__)


def new_id(prefix: str, given: str | None) -> str:
    """Return the id of a reply: the client's, or a new one."""
    return f"{prefix}-{given or uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


def usage_of(num_prompt: int, num_generated: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": None,
    }


def total_usage(prompts: Sequence[Sequence[int]], requests: Iterable[Request]) -> dict[str, Any]:
    """Return the usage of a reply: each prompt counts once."""
    return usage_of(sum(map(len, prompts)), sum(len(r.generated_tokens) for r in requests))


def weight_versions(state: ServerState, request: Request) -> list[dict[str, Any]]:
    """Return which weights sampled which generated tokens, as runs."""
    start = len(request.prompt_tokens)
    spans = request.stamped_policy_spans().slice(start, request.num_tokens)
    return state.labels.runs(spans)


def provenance(request: Request) -> dict[str, Any]:
    """Return what this engine alone knows, for each generated token: how many versions the policy
    that sampled it, and its KV, were behind when the request ended, and the oldest version in the
    KV that it attended to. weights_version: that under which the request entered.
    """
    start = len(request.prompt_tokens)
    policy, kv = request.policy_staleness, request.kv_cache_staleness
    return {
        "weights_version": request.weights_version,
        "policy_staleness": None if policy is None else policy[start:].tolist(),
        "kv_cache_staleness": None if kv is None else kv[start:].tolist(),
        "context_kv_version_min": list(map(int, request.context_kv_version_min)),
    }


def requested_origins(state: ServerState, body: ReplyFields, request: Request) -> dict[str, Any]:
    """Return what a client asked to know of the weights and the KV behind the tokens."""
    origins: dict[str, Any] = {}
    if body.return_weight_versions:
        origins["weight_versions"] = weight_versions(state, request)
    if body.return_provenance:
        origins |= provenance(request)
    return origins


def text_of(state: ServerState, request: Request, *, with_special_tokens: bool) -> str:
    """Return the text of a finished request, "" without a tokenizer."""
    if not with_special_tokens:
        return request.generated_text or ""
    params = request.sampling_params
    assert params is not None, "engines take no request without"
    return shown_text(
        state.texts.verbatim,
        request.generated_tokens,
        finish_reason=request.finish_reason,
        stop_word_ids=request.stop_word_ids,
        sampling_params=params.serialize(),
    )


def streamed_text(
    state: ServerState, params: SamplingParams, *, with_special_tokens: bool
) -> StreamedText | None:
    """Return what turns tokens into text as they come; None without a tokenizer."""
    if state.llm.tokenizer is None:
        return None
    tokenizer = state.texts.verbatim if with_special_tokens else state.llm.tokenizer
    return StreamedText(tokenizer, params)


def shows_special_tokens(fields: SamplingFields) -> bool:
    return fields.skip_special_tokens is False


def priority_of(given: int | None) -> int:
    """Return our priority: as in vLLM, clients give lower numbers to what goes first."""
    return -(given or 0)


async def stream_reply(
    request: web.Request,
    generation: Generation,
    head: dict[str, Any],
    chunks_of: Callable[[int, TokenRun | Request], Iterable[dict[str, Any]]],
    *,
    options: StreamOptions | None,
    num_prompt: int,
    counts_generated: bool = True,
) -> web.StreamResponse:
    """Answer by events: `head` with each chunk that `chunks_of` makes of (index of the sample, its
    new tokens or its whole request), then the usage, if `options` ask for it.

    num_prompt: tokens of all prompts. counts_generated: False for tokens that are dropped.
    """
    num_generated = 0
    stall_s = request.app[STATE].config.stalled_stream_timeout_s
    async with EventStream(request, stall_s) as events, aclosing(generation.stream()) as items:
        try:
            async for index, item in items:
                if counts_generated and not isinstance(item, TokenRun):
                    num_generated += len(item.generated_tokens)
                await events.send(*({**head, **chunk} for chunk in chunks_of(index, item)))
            if options is not None and options.include_usage:
                usage = usage_of(num_prompt, num_generated)
                await events.send({**head, "choices": [], "usage": usage})
        except Exception as fault:
            await send_error(events, fault, openai_form)
        return await events.end()


async def send_error(events: EventStream, fault: Exception, form: ErrorForm) -> None:
    """Tell a client in mid-stream of an error. Raises `fault` if the stream has not begun, or if
    its client has gone.
    """
    if not events.has_begun or isinstance(fault, ConnectionError):
        raise fault
    error = api_error_of(fault)
    if error is None:
        _logger.error("a stream failed", exc_info=fault)
        error = ApiError(500, f"the server failed: {type(fault).__name__}")
    await events.send(form(error))
