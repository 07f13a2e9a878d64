"""POST /v1/chat/completions: conversations, with tools."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rollout.coordinator.protocol.token_runs import TokenRun
from rollout.generated_text import StreamedText
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.serve.errors import ApiError, json_response
from rollout.serve.generation import Generation
from rollout.serve.openai.models import check_model
from rollout.serve.openai.reply import (
    check_stream_options,
    new_id,
    now,
    priority_of,
    requested_origins,
    shows_special_tokens,
    stream_reply,
    streamed_text,
    text_of,
    total_usage,
)
from rollout.serve.openai.reply_reading import ReplyReading, reading_of
from rollout.serve.openai.token_data import (
    TokenData,
    chat_logprobs,
    finite,
    of_generated,
    of_prompt,
    of_run,
    prompt_logprobs,
    spelling,
)
from rollout.serve.openai.tokenizer import chat_ids
from rollout.serve.sampling import (
    check_length,
    default_max_tokens,
    salt_of,
    sampling_params_of,
    truncation_of,
)
from rollout.serve.schemas import ChatBody
from rollout.serve.state import STATE, Route, ServerState
from rollout.tool_calls import Reply, ReplyReader

Request = DynamicInferenceRequest


def chat_routes() -> list[Route]:
    return [
        Route(
            method="POST",
            path="/v1/chat/completions",
            handler=_chat,
            body=ChatBody,
            generates=True,
            summary="Answer a conversation",
        )
    ]


async def _chat(request: web.Request, body: ChatBody) -> web.StreamResponse:
    job = await _job_of(request.app[STATE], body)
    if body.stream:
        return await _stream(request, job)
    requests = await job.generation.results()
    scores = None
    if body.prompt_logprobs is not None:
        scores = prompt_logprobs(of_prompt(requests[0]), body.prompt_logprobs, job.state.texts.of)
    reply = {
        **job.head,
        "object": "chat.completion",
        "choices": [_choice(job, index, each) for index, each in enumerate(requests)],
        "usage": total_usage([job.prompt], requests),
        "prompt_logprobs": scores,
        "prompt_token_ids": job.prompt if body.return_token_ids else None,
    }
    return json_response(reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A conversation to answer, checked. num_top: alternatives of each token, None without
    log-probs. reading: how calls and thoughts are told apart from content, None if they are not.
    """

    state: ServerState
    body: ChatBody
    prompt: list[int]
    num_top: int | None
    reading: ReplyReading | None
    params: SamplingParams
    generation: Generation
    head: dict[str, Any]


async def _job_of(state: ServerState, body: ChatBody) -> _Job:
    """Check a request. Raises ApiError and InvalidRequestError."""
    check_model(state, body.model)
    check_stream_options(body.stream, body.stream_options)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400, f"top_logprobs={body.top_logprobs} needs logprobs=true", param="top_logprobs"
        )
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(400, f"max_tokens={max_tokens} must be at least 1", param="max_tokens")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "log-probs of the prompt cannot be streamed", param="stream")
    prompt = await _prompt_of(state, body, max_tokens)
    if max_tokens is None:
        max_tokens = default_max_tokens(state, len(prompt))
    check_length(state, len(prompt), max_tokens)
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    needs_logprobs = 0 if body.return_tokenized_data else None
    params = sampling_params_of(
        body,
        state,
        max_tokens=max_tokens,
        num_logprobs=needs_logprobs if num_top is None else num_top,
        num_prompt_logprobs=body.prompt_logprobs,
        with_ranks=body.prompt_logprobs is not None,
        cache_salt=salt_of(body.cache_salt, body.extra_key),
    )
    reading = await reading_of(state, body, prompt)
    request_id = body.request_id or body.rid
    reply_id = new_id("chatcmpl", request_id)
    return _Job(
        state=state,
        body=body,
        prompt=prompt,
        num_top=num_top,
        reading=reading,
        params=params,
        generation=Generation(
            state,
            [prompt],
            params,
            n=1 if body.n is None else body.n,
            name=request_id or reply_id,
            priority=priority_of(body.priority),
        ),
        head={"id": reply_id, "created": now(), "model": body.model or state.served_name},
    )


async def _prompt_of(state: ServerState, body: ChatBody, max_tokens: int | None) -> list[int]:
    """Return the ids of the conversation. Raises ApiError."""
    cut = truncation_of(state, body, max_tokens)
    prompt = body.prompt_token_ids or body.input_ids
    if not prompt:
        prompt = await chat_ids(
            state, body, max_tokens=state.max_model_len if cut is None else None
        )
    if not prompt:
        raise ApiError(400, "the conversation has no token", param="messages")
    return prompt if cut is None else prompt[cut]


# ---- the reply


def _choice(job: _Job, index: int, request: Request) -> dict[str, Any]:
    """Return a whole choice."""
    body, data = job.body, of_generated(request)
    text = _text_of(job, request)
    reply = Reply(content=text) if job.reading is None else job.reading.read(text)
    content = reply.content or (None if reply.calls or reply.reasoning else "")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= _reasoning(job, reply)
    if reply.calls:
        message["tool_calls"] = [call.as_json() for call in reply.calls]
    if body.return_tokenized_data:
        message["prompt_token_ids"] = job.prompt
        message["generation_token_ids"] = data.token_ids
        message["generation_log_probs"] = [finite(lp or 0.0) for lp in data.log_probs or ()]
    if body.return_raw_text:
        message["raw_text"] = text
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(job, data),
        "token_ids": data.token_ids if body.return_token_ids else None,
        **_ending(job, request, has_calls=bool(reply.calls)),
    }


def _text_of(job: _Job, request: Request) -> str:
    """Return the text of a finished request, with the tags that its reading needs."""
    return text_of(
        job.state,
        request,
        with_special_tokens=shows_special_tokens(job.body),
        tokenizer=None if job.reading is None else job.reading.tokenizer,
    )


def _reasoning(job: _Job, reply: Reply) -> dict[str, str]:
    """Return the thoughts under vLLM's name and under SGLang's, if there are any."""
    if not reply.reasoning or (job.reading is not None and not job.reading.shows_reasoning):
        return {}
    return {"reasoning": reply.reasoning, "reasoning_content": reply.reasoning}


def _logprobs(job: _Job, data: TokenData) -> dict[str, Any] | None:
    if job.num_top is None:
        return None
    spell = spelling(job.state.texts.of, bool(job.body.return_tokens_as_token_ids))
    return chat_logprobs(data, job.num_top, spell, job.state.texts.bytes_of)


def _ending(job: _Job, request: Request, *, has_calls: bool) -> dict[str, Any]:
    reason = request.finish_reason
    return {
        "finish_reason": "tool_calls" if has_calls and reason == "stop" else reason,
        "stop_reason": request.stop_reason,
        **requested_origins(job.state, job.body, request),
    }


# ---- streams


@dataclass(slots=True)
class _Progress:
    """What turns the tokens of one choice into deltas, and whether it has any yet."""

    text: StreamedText | None
    reader: ReplyReader | None
    has_begun: bool = False


async def _stream(request: web.Request, job: _Job) -> web.StreamResponse:
    progress: defaultdict[int, _Progress] = defaultdict(lambda: _new_progress(job))
    return await stream_reply(
        request,
        job.generation,
        {**job.head, "object": "chat.completion.chunk"},
        lambda index, item: _chunks(job, index, item, progress[index]),
        options=job.body.stream_options,
        prompts=[job.prompt],
    )


def _new_progress(job: _Job) -> _Progress:
    special = shows_special_tokens(job.body)
    return _Progress(
        text=streamed_text(
            job.state,
            job.params,
            job.prompt,
            with_special_tokens=special,
            tokenizer=None if job.reading is None else job.reading.tokenizer,
        ),
        reader=None if job.reading is None else job.reading.reader(),
    )


def _chunks(
    job: _Job, index: int, item: TokenRun | Request, progress: _Progress
) -> list[dict[str, Any]]:
    """Return what is sent for new tokens, or for the end of a choice."""
    chunks = []
    if not progress.has_begun:
        progress.has_begun = True
        first: dict[str, Any] = {"choices": [_delta(index, {"role": "assistant", "content": ""})]}
        if job.body.return_token_ids:
            first["prompt_token_ids"] = job.prompt
        chunks.append(first)
    if isinstance(item, TokenRun):
        data = of_run(item)
        text = "" if progress.text is None else progress.text.push(data.token_ids)
        choice = _delta(index, _text_delta(job, progress, text, is_last=False))
        choice["logprobs"] = _logprobs(job, data)
        if job.body.return_token_ids:
            choice["token_ids"] = data.token_ids
        return [*chunks, {"choices": [choice]}]
    rest = "" if progress.text is None else progress.text.finish(_text_of(job, item))
    delta = _text_delta(job, progress, rest, is_last=True)
    if delta:
        chunks.append({"choices": [_delta(index, delta)]})
    has_calls = progress.reader is not None and progress.reader.num_calls > 0
    choice = _delta(index, {}) | _ending(job, item, has_calls=has_calls)
    return [*chunks, {"choices": [choice]}]


def _text_delta(job: _Job, progress: _Progress, text: str, *, is_last: bool) -> dict[str, Any]:
    """Return the delta of new text: content, thoughts, and calls, each in one piece."""
    reader = progress.reader
    if reader is None:
        return {"content": text} if text or not is_last else {}
    first = reader.num_calls
    reply = reader.push(text)
    if is_last:
        reply = reply + reader.finish()
    delta: dict[str, Any] = {"content": reply.content} if reply.content else {}
    delta |= _reasoning(job, reply)
    if reply.calls:
        delta["tool_calls"] = [call.as_json(first + i) for i, call in enumerate(reply.calls)]
    return delta


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }
