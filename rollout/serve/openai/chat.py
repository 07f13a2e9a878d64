"""POST /v1/chat/completions: conversations, with tools."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rollout.generated_text import StreamedText
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.token_runs import TokenRun
from rollout.serve.errors import ApiError, json_response
from rollout.serve.openai.models import check_model
from rollout.serve.openai.reply import Job, check_stream, max_tokens_of, stream_reply, total_usage
from rollout.serve.openai.reply_reading import ReplyReading, reading_of
from rollout.serve.openai.token_data import (
    TokenData,
    chat_logprobs,
    finite,
    of_generated,
    of_run,
    spelling,
)
from rollout.serve.openai.tokenizer import chat_ids
from rollout.serve.sampling import (
    check_length,
    default_max_tokens,
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
    reply = {
        **job.head,
        "object": "chat.completion",
        "choices": [_choice(job, index, each) for index, each in enumerate(requests)],
        "usage": total_usage(job.prompts, requests),
        "prompt_logprobs": job.prompt_scores(requests[0]),
        "prompt_token_ids": job.prompts[0] if body.return_token_ids else None,
    }
    return json_response(reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job(Job[ChatBody]):
    """A conversation to answer. num_top: alternatives of each token, None without log-probs.
    reading: separates calls and thoughts from content; None leaves them in it.
    """

    num_top: int | None
    reading: ReplyReading | None


async def _job_of(state: ServerState, body: ChatBody) -> _Job:
    """Check a request. Raises ApiError and InvalidRequestError."""
    check_model(state, body.model)
    check_stream(body.stream, body.stream_options, body.prompt_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400, f"top_logprobs={body.top_logprobs} needs logprobs=true", param="top_logprobs"
        )
    max_tokens = max_tokens_of(body)
    prompt = await _prompt_of(state, body, max_tokens)
    if max_tokens is None:
        max_tokens = default_max_tokens(state, len(prompt))
    check_length(state, len(prompt), max_tokens)
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    needs_logprobs = 0 if body.return_tokenized_data else None
    reading = await reading_of(state, body, prompt)
    return _Job.make(
        state,
        body,
        [prompt],
        prefix="chatcmpl",
        max_tokens=max_tokens,
        num_logprobs=needs_logprobs if num_top is None else num_top,
        num_prompt_logprobs=body.prompt_logprobs,
        tokenizer=None if reading is None else reading.tokenizer,
        num_top=num_top,
        reading=reading,
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
    text = job.text_of(request)
    reply = Reply(content=text) if job.reading is None else job.reading.read(text)
    content = reply.content or (None if reply.calls or reply.reasoning else "")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= _reasoning(job, reply)
    if reply.calls:
        message["tool_calls"] = [call.as_json() for call in reply.calls]
    if body.return_tokenized_data:
        message["prompt_token_ids"] = job.prompts[0]
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
    ending = job.ending(request)
    if has_calls and request.finish_reason == "stop":
        ending["finish_reason"] = "tool_calls"
    return ending


# ---- streams


@dataclass(slots=True)
class _Progress:
    """State of a streamed choice. has_begun: whether a chunk was sent."""

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
        prompts=job.prompts,
    )


def _new_progress(job: _Job) -> _Progress:
    reader = None if job.reading is None else job.reading.reader()
    return _Progress(text=job.streamed_text(0), reader=reader)


def _chunks(
    job: _Job, index: int, item: TokenRun | Request, progress: _Progress
) -> list[dict[str, Any]]:
    """Return what is sent for new tokens, or for the end of a choice."""
    chunks = []
    if not progress.has_begun:
        progress.has_begun = True
        first: dict[str, Any] = {"choices": [_delta(index, {"role": "assistant", "content": ""})]}
        if job.body.return_token_ids:
            first["prompt_token_ids"] = job.prompts[0]
        chunks.append(first)
    if isinstance(item, TokenRun):
        data = of_run(item)
        text = "" if progress.text is None else progress.text.push(data.token_ids)
        choice = _delta(index, _text_delta(job, progress, text, is_last=False))
        choice["logprobs"] = _logprobs(job, data)
        if job.body.return_token_ids:
            choice["token_ids"] = data.token_ids
        return [*chunks, {"choices": [choice]}]
    rest = "" if progress.text is None else progress.text.finish(job.text_of(item))
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
