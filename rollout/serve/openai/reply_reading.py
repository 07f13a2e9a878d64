"""ReplyReading: how the replies of one chat request are read, and by which tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout.serve.errors import ApiError
from rollout.serve.schemas import ChatBody
from rollout.serve.state import ServerState
from rollout.serve.token_texts import TokenTexts
from rollout.text import Tokenizer
from rollout.tool_calls import Reply, ReplyFormat, ReplyReader, format_of

_NUM_LAST = 32  # tokens of a prompt in which it begins a reply


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyReading:
    """How the replies to one request are read.

    tokenizer: what decodes them; None: that of other texts. special: tags that are special tokens,
    which are no content. begun: markup that the prompt has begun.
    """

    reply_format: ReplyFormat
    tools: Sequence[Any]
    tokenizer: Tokenizer | None
    special: frozenset[str]
    begun: str
    max_calls: int | None

    def reader(self) -> ReplyReader:
        """Return a reader for one reply."""
        reader = ReplyReader(
            self.reply_format, self.tools, special=self.special, max_calls=self.max_calls
        )
        reader.push(self.begun)
        return reader

    def read(self, text: str) -> Reply:
        """Return a whole reply."""
        reader = self.reader()
        return reader.push(text) + reader.finish()


def reading_of(state: ServerState, body: ChatBody, prompt: Sequence[int]) -> ReplyReading | None:
    """Return how replies to `body` are read; None: as they are. Raises ApiError for a tool_choice
    that would need a constrained draw.
    """
    tools = _callable_tools(body)
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
    texts, shows_all = state.texts, body.skip_special_tokens is False
    special = frozenset[str]() if shows_all else special_tags(texts, reply_format.markers)
    return ReplyReading(
        reply_format=reply_format,
        tools=tools,
        tokenizer=TagTokenizer(texts, special) if special else None,
        special=special,
        begun=reply_format.begun_by(
            texts.verbatim.decode(prompt[-_NUM_LAST:]), _continued(body) or ""
        ),
        max_calls=1 if body.parallel_tool_calls is False else None,
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


def _continued(body: ChatBody) -> str | None:
    """Return the beginning of the reply that the request itself gives."""
    content = body.messages[-1].get("content") if body.messages else None
    return content if body.continue_final_message and isinstance(content, str) else None


def special_tags(texts: TokenTexts, tags: frozenset[str]) -> frozenset[str]:
    """Return which of `tags` are special tokens, that texts leave out."""
    tokenizer = texts.tokenizer
    return frozenset(
        tag
        for tag in tags
        if any(texts.of(i) == tag and not tokenizer.decode([i]) for i in tokenizer.encode(tag))
    )


class TagTokenizer:
    """A tokenizer whose texts have the special tokens that are `tags`, and no others."""

    def __init__(self, texts: TokenTexts, tags: frozenset[str]) -> None:
        self._texts, self._tags = texts, tags
        self._tokenizer, self._verbatim = texts.tokenizer, texts.verbatim
        self.eos_id, self.bos_id = self._tokenizer.eos_id, self._tokenizer.bos_id
        self.vocab_size = self._tokenizer.vocab_size
        self._is_shown: dict[int, bool] = {}

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._verbatim.decode([i for i in ids if self._shows(i)])

    def _shows(self, token_id: int) -> bool:
        is_shown = self._is_shown.get(token_id)
        if is_shown is None:
            text = self._verbatim.decode([token_id])
            is_shown = not text or text in self._tags or bool(self._tokenizer.decode([token_id]))
            self._is_shown[token_id] = is_shown
        return is_shown
