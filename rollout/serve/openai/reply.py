"""Parts of replies that completions, chat and tokens in and out share."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from rollout.generated_text import StreamedText, shown_text
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.serve.errors import ApiError, ErrorForm, api_error_of
from rollout.serve.event_stream import EventStream
from rollout.serve.schemas import SamplingFields, StreamOptions
from rollout.serve.state import ServerState

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


def wants_usage(options: StreamOptions | None) -> bool:
    return options is not None and bool(options.include_usage)


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
    state: ServerState, params: Any, *, with_special_tokens: bool
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


def stop_reason(request: Request) -> Any:
    """Return the id or the text that a request stopped at, None at an end token."""
    return getattr(request, "stop_reason", None)


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
