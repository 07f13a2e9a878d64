"""Conversation: turns chat messages into token ids without tokenising sampled text again.

Used by `trainer_hooks.environments.episodes`, `trainer_hooks.environments.chat_session` and users'
rollout functions. A Conversation keeps its text, ids and requests in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jinja2 import TemplateError

from rollout.errors import ConfigError
from rollout.requests import DynamicInferenceRequest
from rollout.tool_calls import THOUGHTS, ReplyFormat, ToolCall, format_of, read_reply
from trainer_hooks.environments.protocol import Message, ModelTurn, ToolSchema
from trainer_hooks.rollouts import Rollout

# A code point that no text contains. The texts on its two sides are tokenised separately.
_CUT = "\ufdd0"
# Last characters of a prompt, which are searched for markup that the reply continues.
_NUM_LAST = 200


class Conversation:
    """The token ids of a conversation with the model, turn by turn.

        ids = conversation.prompt(messages)      # all messages so far
        request = await llm.generate(ids)
        turn = conversation.add(request)
        messages.append(turn.message)            # then the answer of a tool or a user

    The chat template renders all messages as text, with each turn of the model exactly as
    generated. If the new text extends the previous text, the ids are the previous ids, the sampled
    ids, and the ids of the added text. Otherwise the whole text is tokenised and starts a new token
    sequence. Templates that drop earlier thinking, and edited messages, have this effect. So every
    prompt is exactly the template's text of the messages.

    Special tokens come only from the template and the model. Text such as "<|im_end|>" in any other
    message is tokenised as plain text.

    `requests`: the requests of the model's turns, in order.
    `sequence_starts`: index in `requests` of the first turn of each token sequence.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[ToolSchema] = (),
        template_options: Mapping[str, Any] | None = None,
        reply_format: ReplyFormat | None = None,
    ) -> None:
        """Start without messages. Raises ConfigError for a tokenizer without a chat template.

        `tokenizer`: a transformers tokenizer.
        `template_options`: arguments of the template, such as enable_thinking.
        `reply_format`: markup of thoughts and calls. None detects it in the chat template.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"the tokenizer {type(tokenizer).__name__} has no chat template, which a "
                "conversation needs; set its chat_template"
            )
        self._tokenizer, self._tools = tokenizer, [dict(tool) for tool in tools]
        self._options = dict(template_options or {})
        self._format = reply_format or _format_of(tokenizer, bool(tools))
        added = tokenizer.added_tokens_decoder.items()
        special = {token_id: str(token) for token_id, token in added if token.special}
        self._special_ids = frozenset(tokenizer.all_special_ids) | set(special)
        texts = {*tokenizer.all_special_tokens, *special.values()}
        longer = "|".join(re.escape(text) for text in sorted(texts) if len(text) > 1)
        self._special_start = re.compile(f"(?=(?:{longer}))(.)", re.DOTALL) if longer else None
        self._text = ""
        self._ids: list[int] = []
        self._end_text = ""  # text of the special token that ended the last turn
        self._turns: dict[int, ModelTurn] = {}  # turns by the index of their message
        self._num_messages = 0
        self.requests: list[DynamicInferenceRequest] = []
        self.sequence_starts: list[int] = []

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of all `messages`, up to the start of the model's next turn."""
        text = self._rendered(messages)
        known = self._text + self._end_text
        if self.requests and text.startswith(known):
            self._ids = self._ids + self._encode(text[len(known) :])
        else:
            self._ids = self._encode(text)
            if self.sequence_starts[-1:] != [len(self.requests)]:
                self.sequence_starts.append(len(self.requests))
        self._text, self._end_text, self._num_messages = text, "", len(messages)
        return list(self._ids)

    def add(self, request: DynamicInferenceRequest) -> ModelTurn:
        """Record the finished request of the last `prompt` call, and return its turn. Raises
        ConfigError for a request with another prompt."""
        if request.prompt_tokens.tolist() != self._ids:
            raise ConfigError(
                f"request {request.request_id} was not generated from the last prompt of this "
                "conversation; add each turn before the next prompt is made"
            )
        generated = list(request.generated_tokens)
        body = generated
        if request.finish_reason == "stop" and generated and generated[-1] in self._special_ids:
            body = generated[:-1]
        text = self._decode(body)
        self._end_text = self._decode(generated)[len(text) :]
        begun = self._format.begun_by(self._text[-_NUM_LAST:])
        self._text, self._ids = self._text + text, self._ids + generated
        self.requests.append(request)
        reply = read_reply(self._format, text, self._tools, begun=begun)
        turn = ModelTurn(
            text=text,
            content=reply.content.strip(),
            reasoning=reply.reasoning,
            tool_calls=reply.calls,
            malformed_calls=reply.malformed,
        )
        self._turns[self._num_messages] = turn
        return turn

    def _rendered(self, messages: Sequence[Message]) -> str:
        render = partial(
            self._tokenizer.apply_chat_template,
            tools=self._tools or None,
            tokenize=False,
            add_generation_prompt=True,
            **self._options,
        )
        try:
            return str(render([self._as_generated(i, each) for i, each in enumerate(messages)]))
        except TemplateError:  # GPT-OSS's template refuses markup in a message
            if not self._turns:
                raise
            return str(render([self._split(i, each) for i, each in enumerate(messages)]))

    def rollout(self, **fields: Any) -> Rollout:
        """Return the turns so far as a Rollout with further `fields`, such as `reward`."""
        starts = [start for start in self.sequence_starts if start < len(self.requests)]
        return Rollout(list(self.requests), sequence_starts=starts or (0,), **fields)

    def _as_generated(self, index: int, message: Message) -> dict[str, Any]:
        """Return the message for the template. A turn of the model has its generated text as
        content."""
        turn = self._turns.get(index)
        if turn is not None and _is_of(message, turn):
            return {"role": "assistant", "content": turn.text}
        return {name: self._without_special(value) for name, value in message.items()}

    def _split(self, index: int, message: Message) -> dict[str, Any]:
        """Return the message for the template. A turn of the model has separate thoughts, content
        and calls."""
        turn = self._turns.get(index)
        if turn is None or not _is_of(message, turn):
            return {name: self._without_special(value) for name, value in message.items()}
        parts: dict[str, Any] = {"role": "assistant", "content": turn.content}
        if turn.reasoning:
            parts |= {"thinking": turn.reasoning, "reasoning_content": turn.reasoning}
        if turn.tool_calls:
            parts["tool_calls"] = [_as_object(call) for call in turn.tool_calls]
        return parts

    def _without_special(self, value: Any) -> Any:
        """Return `value` with a _CUT inside each text of a special token, also in nested values."""
        if isinstance(value, str):
            return (
                value
                if self._special_start is None
                else self._special_start.sub(rf"\1{_CUT}", value)
            )
        if isinstance(value, Mapping):
            return {name: self._without_special(each) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._without_special(each) for each in value]
        return value

    def _encode(self, text: str) -> list[int]:
        pieces = [piece for piece in text.split(_CUT) if piece]
        encode = self._tokenizer.encode
        return [token for piece in pieces for token in encode(piece, add_special_tokens=False)]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def _format_of(tokenizer: Any, has_tools: bool) -> ReplyFormat:
    """Return the reply format of the chat template, by default with <think> tags."""
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        named = "tool_use" if has_tools and "tool_use" in template else "default"
        template = template.get(named)
    shown = format_of(template)
    return replace(shown, thoughts=shown.thoughts or THOUGHTS[0])


def _as_object(call: ToolCall) -> dict[str, Any]:
    written = call.as_json()
    return {**written, "function": {"name": call.name, "arguments": _parsed(call.arguments)}}


def _is_of(message: Message, turn: ModelTurn) -> bool:
    return message.get("role") == "assistant" and _key(message) == _key(turn.message)


def _key(message: Message) -> tuple[str, list[tuple[str, Any]]]:
    """Return the parts of a turn's message that a client leaves unchanged when it sends them
    back."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return (message.get("content") or "").strip(), [
        (call.get("name", ""), _parsed(call.get("arguments"))) for call in calls
    ]


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
