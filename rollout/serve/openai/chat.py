"""POST /v1/chat/completions: answers conversations, with tool calls and thoughts.

`rollout.serve.app` registers `chat_routes`. `_job_of` checks a request. `send_reply` of
`rollout.serve.openai.reply` generates the choices and sends the reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.token_runs import TokenRun
from rollout.serve.errors import ApiError
from rollout.serve.openai.logprobs import chat_logprobs, spelling
from rollout.serve.openai.model import chat_ids
from rollout.serve.openai.reply import (
    ChoiceStream,
    TextJob,
    check_stream,
    max_tokens_of,
    send_reply,
)
from rollout.serve.samples import TokenData, finite, of_generated, of_run
from rollout.serve.sampling import check_length, default_max_tokens, truncation_of
from rollout.serve.schemas import ChatBody
from rollout.serve.state import STATE, Route, ServerState
from rollout.serve.token_texts import TagTokenizer
from rollout.tool_calls import Reply, ReplyFormat, ReplyReader, format_of

_NUM_LAST = 32  # last tokens of a prompt that are searched for markup which the reply continues

Request = DynamicInferenceRequest


def chat_routes() -> list[Route]:
    return [
        Route(
            path="/v1/chat/completions",
            handler=_chat,
            body=ChatBody,
            generates=True,
            summary="Answer a conversation",
        )
    ]


async def _chat(request: web.Request, body: ChatBody) -> web.StreamResponse:
    return await send_reply(request, await _job_of(request.app[STATE], body))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job(TextJob[ChatBody]):
    """A checked request, with the prompt of its conversation.

    num_top: alternatives reported with each token, or None if no log-probs are reported.
    reading: separates calls and thoughts from content. If None, both stay in the content.
    """

    num_top: int | None
    reading: _ReplyReading | None

    def reply(self, requests: Sequence[Request]) -> dict[str, Any]:
        return {
            "choices": [_choice(self, index, each) for index, each in enumerate(requests)],
            "prompt_logprobs": self.prompt_logprobs_of(requests[0]),
            "prompt_token_ids": self.prompts[0] if self.body.return_token_ids else None,
        }

    def choice_stream(self, index: int) -> ChoiceStream:
        return _ChoiceStream(self, index).chunks


async def _job_of(state: ServerState, body: ChatBody) -> _Job:
    """Return the job of a checked body. Raises ApiError and InvalidRequestError for a bad body."""
    state.require_model(body.model)
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
    reading = await _reading_of(state, body, prompt)
    return _Job.make(
        state,
        body,
        [prompt],
        prefix="chatcmpl",
        kind="chat.completion.chunk" if body.stream else "chat.completion",
        max_tokens=max_tokens,
        num_logprobs=needs_logprobs if num_top is None else num_top,
        num_prompt_logprobs=body.prompt_logprobs,
        tokenizer=None if reading is None else reading.tokenizer,
        num_top=num_top,
        reading=reading,
    )


async def _prompt_of(state: ServerState, body: ChatBody, max_tokens: int | None) -> list[int]:
    """Return the token ids in the body, or else the ids of the rendered conversation. Raises
    ApiError."""
    cut = truncation_of(state, body, max_tokens)
    prompt = body.prompt_token_ids or body.input_ids
    if not prompt:
        prompt = await chat_ids(
            state, body, max_tokens=state.max_model_len if cut is None else None
        )
    if not prompt:
        raise ApiError(
            400, "the conversation has no token; give messages with content", param="messages"
        )
    return prompt if cut is None else prompt[cut]


# ---- the reply


def _choice(job: _Job, index: int, request: Request) -> dict[str, Any]:
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
    """Return the thoughts under vLLM's and SGLang's keys, or {} if none are returned."""
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


class _ChoiceStream:
    """Makes the chunks of one streamed choice: decodes its tokens and separates calls and
    thoughts."""

    def __init__(self, job: _Job, index: int) -> None:
        self._job, self._index = job, index
        self._text = job.streamed_text(index)
        self._reader = None if job.reading is None else job.reading.reader()
        self._has_begun = False

    def chunks(self, item: TokenRun | Request) -> list[dict[str, Any]]:
        """Return the chunks for new tokens, or the last chunks if `item` is the finished
        request."""
        job, chunks = self._job, list[dict[str, Any]]()
        if not self._has_begun:
            self._has_begun = True
            first = self._chunk({"role": "assistant", "content": ""})
            if job.body.return_token_ids:
                first["prompt_token_ids"] = job.prompts[0]
            chunks.append(first)
        if isinstance(item, TokenRun):
            data = of_run(item)
            text = "" if self._text is None else self._text.push(data.token_ids)
            fields: dict[str, Any] = {"logprobs": _logprobs(job, data)}
            if job.body.return_token_ids:
                fields["token_ids"] = data.token_ids
            return [*chunks, self._chunk(self._delta(text, is_last=False), **fields)]
        text = "" if self._text is None else self._text.finish(job.text_of(item))
        if delta := self._delta(text, is_last=True):
            chunks.append(self._chunk(delta))
        has_calls = self._reader is not None and self._reader.num_calls > 0
        return [*chunks, self._chunk({}, **_ending(job, item, has_calls=has_calls))]

    def _delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Return the content, thoughts and complete calls that `text` adds."""
        reader = self._reader
        if reader is None:
            return {"content": text} if text or not is_last else {}
        first = reader.num_calls
        reply = reader.push(text)
        if is_last:
            reply = reply + reader.finish()
        delta: dict[str, Any] = {"content": reply.content} if reply.content else {}
        delta |= _reasoning(self._job, reply)
        if reply.calls:
            delta["tool_calls"] = [call.as_json(first + i) for i, call in enumerate(reply.calls)]
        return delta

    def _chunk(self, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {
            "index": self._index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        return {"choices": [choice | fields]}


# ---- calls and thoughts


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplyReading:
    """Separates calls and thoughts from the content of the replies to one request.

    reply_format: markup of calls and thoughts.
    tools: tools that the model can call.
    tokenizer: decodes replies and keeps markup that consists of special tokens. None takes the
        LLM's tokenizer.
    begun: markup at the end of the prompt, which the reply continues.
    max_calls: most calls that are returned, or None for all.
    shows_reasoning: whether thoughts are returned.
    """

    reply_format: ReplyFormat
    tools: Sequence[Any]
    tokenizer: TagTokenizer | None
    begun: str
    max_calls: int | None
    shows_reasoning: bool

    def reader(self) -> ReplyReader:
        special = () if self.tokenizer is None else self.tokenizer.tags
        reader = ReplyReader(
            self.reply_format, self.tools, special=special, max_calls=self.max_calls
        )
        reader.push(self.begun)
        return reader

    def read(self, text: str) -> Reply:
        reader = self.reader()
        return reader.push(text) + reader.finish()


async def _reading_of(
    state: ServerState, body: ChatBody, prompt: Sequence[int]
) -> _ReplyReading | None:
    """Return the _ReplyReading of the replies to `body`, or None if there is no markup to look for.
    Raises ApiError for an unsupported tool_choice and for a prompt that cannot be decoded."""
    tools = _callable_tools(body)
    max_calls = 1 if body.parallel_tool_calls is False else None
    shows_reasoning = body.include_reasoning is not False
    if state.llm.tokenizer is None:
        return None
    reply_format = state.reply_format
    if body.chat_template is not None:
        reply_format = format_of(
            body.chat_template,
            tool_call_parser=state.config.tool_call_parser,
            reasoning_parser=state.config.reasoning_parser,
        )
    if not tools:
        reply_format = reply_format.without_calls()
    if body.separate_reasoning is False:
        reply_format = reply_format.without_thoughts()
    if not reply_format.markers:
        return None
    shows_all = body.skip_special_tokens is False
    tokenizer = None if shows_all else state.texts.showing(reply_format.markers)
    last = await state.texts.decode(prompt[-_NUM_LAST:])
    return _ReplyReading(
        reply_format=reply_format,
        tools=tools,
        tokenizer=tokenizer,
        begun=reply_format.begun_by(last, _continued(body)),
        max_calls=max_calls,
        shows_reasoning=shows_reasoning,
    )


def _callable_tools(body: ChatBody) -> Sequence[Any]:
    if body.tool_choice not in (None, "none", "auto"):
        raise ApiError(
            400,
            f"tool_choice={body.tool_choice!r} is not supported; give 'auto' or 'none'",
            param="tool_choice",
        )
    return [] if body.tool_choice == "none" else body.tools or []


def _continued(body: ChatBody) -> str:
    """Return the text of the last message if the reply continues it, else ""."""
    content = body.messages[-1].get("content") if body.messages else None
    return content if body.continue_final_message and isinstance(content, str) else ""
