"""ReplyReading: how the replies of one chat request are read, and by which tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout.serve.errors import ApiError
from rollout.serve.schemas import ChatBody
from rollout.serve.state import ServerState
from rollout.serve.tag_tokenizers import TagTokenizer
from rollout.tool_calls import Reply, ReplyFormat, ReplyReader, format_of

_NUM_LAST = 32  # tokens of a prompt in which it begins a reply


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyReading:
    """Reads the replies to one request.

    tokenizer: decodes replies with their special-token tags; None: the server's tokenizer does.
    begun: markup that the prompt has begun. max_calls: None for all. shows_reasoning: whether
    clients get the thoughts.
    """

    reply_format: ReplyFormat
    tools: Sequence[Any]
    tokenizer: TagTokenizer | None
    begun: str
    max_calls: int | None
    shows_reasoning: bool

    def reader(self) -> ReplyReader:
        """Return a reader for one reply."""
        special = () if self.tokenizer is None else self.tokenizer.tags
        reader = ReplyReader(
            self.reply_format, self.tools, special=special, max_calls=self.max_calls
        )
        reader.push(self.begun)
        return reader

    def read(self, text: str) -> Reply:
        """Return a whole reply."""
        reader = self.reader()
        return reader.push(text) + reader.finish()


async def reading_of(
    state: ServerState, body: ChatBody, prompt: Sequence[int]
) -> ReplyReading | None:
    """Return how replies to `body` are read; None: as they are. Raises ApiError for a tool_choice
    that would need a constrained draw, and for a prompt that cannot be decoded.
    """
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
    tokenizer = None if shows_all else state.tag_tokenizers.of(reply_format.markers)
    last = await state.texts.decode(prompt[-_NUM_LAST:])
    return ReplyReading(
        reply_format=reply_format,
        tools=tools,
        tokenizer=tokenizer,
        begun=reply_format.begun_by(last, _continued(body)),
        max_calls=max_calls,
        shows_reasoning=shows_reasoning,
    )


def _callable_tools(body: ChatBody) -> Sequence[Any]:
    """Return the tools whose calls are looked for."""
    if body.tool_choice not in (None, "none", "auto"):
        raise ApiError(
            400,
            f"tool_choice={body.tool_choice!r} is not supported: 'auto' or 'none' is",
            param="tool_choice",
        )
    return [] if body.tool_choice == "none" else body.tools or []


def _continued(body: ChatBody) -> str:
    """Return the beginning of the reply that the request itself gives, "" without one."""
    content = body.messages[-1].get("content") if body.messages else None
    return content if body.continue_final_message and isinstance(content, str) else ""
