"""ChatTemplate: a conversation as text, by the Jinja template that comes with a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollout.errors import ConfigError
from rollout.json_files import object_if_there
from rollout.serve.errors import ApiError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_NUM_CACHED = 16  # templates that clients send

Message = Mapping[str, Any]


class ChatTemplate:
    """source: the template's text; special_tokens: those it may name, by their role."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source, self.special_tokens = source, special_tokens

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation's text. `template` is used in place of this one. Raises ApiError
        for a conversation that the template refuses.
        """
        if continue_final_message and add_generation_prompt:
            raise ApiError(
                400, "continue_final_message needs add_generation_prompt=false", param="messages"
            )
        conversation = [_plain(message) for message in messages]
        try:
            text = _compiled(template or self.source).render(
                {
                    **self.special_tokens,
                    "messages": conversation,
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    **(variables or {}),
                }
            )
        except Exception as fault:  # a template may raise anything
            raise ApiError(400, f"the chat template failed: {fault}", param="messages") from None
        return _ended(text, conversation[-1]) if continue_final_message else text


def load_template(directory: str | None, given: str | None) -> ChatTemplate | None:
    """Return the template that is `given`, a file or a text, else that of a model directory; None
    if there is none. Raises ConfigError for one that is no template.
    """
    config: dict[str, Any] = {}
    source = given
    if directory is not None:
        root = Path(directory)
        config = object_if_there(root / "tokenizer_config.json")
        if source is None and (root / "chat_template.jinja").is_file():
            source = (root / "chat_template.jinja").read_text(encoding="utf-8")
        elif source is None:
            source = _template_in(config.get("chat_template"))
    if given is not None and "{" not in given:
        if not Path(given).is_file():
            raise ConfigError(f"chat_template={given!r} is neither a file nor a template")
        source = Path(given).read_text(encoding="utf-8")
    if source is None:
        return None
    try:
        _compiled(source)
    except jinja2.TemplateError as fault:
        raise ConfigError(f"the chat template cannot be read: {fault}") from fault
    tokens = {name: _text_of(config.get(name)) for name in _SPECIAL_TOKENS}
    return ChatTemplate(source, {name: text for name, text in tokens.items() if text is not None})


def _template_in(entry: Any) -> str | None:
    """Return the template of a tokenizer's config, which may have several by name."""
    if isinstance(entry, list):
        by_name = {each["name"]: each["template"] for each in entry}
        entry = by_name.get("default")
    return entry if isinstance(entry, str) else None


def _text_of(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


# ---- messages


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: parts of text joined, arguments of calls as objects.

    Raises ApiError for parts that are no text.
    """
    plain = dict(message)
    if not isinstance(plain.get("role"), str):
        raise ApiError(400, "each message needs a role", param="messages")
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "".join(_text_of_part(part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise ApiError(400, "the content of a message must be text", param="messages")
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _text_of_part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") in ("text", None):
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ApiError(400, "messages may have text parts alone", param="messages")


def _plain_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call  # the template writes the text
    return {**call, "function": {**function, "arguments": arguments}}


def _ended(text: str, last: Message) -> str:
    """Return `text` up to the end of the last message's content."""
    content = (last.get("content") or "").strip()
    start = text.rfind(content)
    if not content or start < 0:
        raise ApiError(400, "the last message has no content to continue", param="messages")
    return text[: start + len(content)]


# ---- the sandbox


class _Generation(Extension):
    """{% generation %} marks what an assistant wrote, for training; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(_NUM_CACHED)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
