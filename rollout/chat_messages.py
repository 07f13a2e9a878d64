"""Converts chat messages of clients and data sets to the form that chat templates expect.

Used by `rollout.serve.openai.chat_template`, `trainer_hooks.prompts.rows` and
`trainer_hooks.environments.chat_session`. Nothing is changed in place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_SHOWN = 60  # characters of a refused value


def plain_message(message: Mapping[str, Any], *, reads_parts: bool = False) -> dict[str, Any]:
    """Return a message as chat templates expect it.

    Keys with null values are left out. Content parts are joined into one text, unless the template
    reads parts (`reads_parts`). Arguments of tool calls that are JSON text become JSON values.
    Raises ValueError for a message without a role, and for content that is not text.
    """
    plain = {name: value for name, value in message.items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise ValueError(
            f"a message has the role {_shown(plain.get('role'))}; it must be a text such as 'user'"
        )
    content = plain.get("content")
    if isinstance(content, list):
        text = joined_parts(content)
        plain["content"] = content if reads_parts else text
    elif content is not None and not isinstance(content, str):
        raise ValueError(
            f"a message has the content {_shown(content)}; it must be a text, or parts of type text"
        )
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_with_object(call) for call in calls]
    return plain


def joined_parts(parts: Sequence[Any]) -> str:
    """Join the texts of content parts. Raises ValueError for a part that is not text."""
    return "".join(map(_text_of, parts))


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in ("text", None):
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ValueError(
        f"a message has a part that is not text, {_shown(part)}; the engine serves models of "
        "text only: give the message a text, or parts of type text"
    )


def _with_object(call: Any) -> Any:
    """Return a tool call whose arguments are parsed if they are JSON text; "" becomes {}."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call  # the template then shows the text
    return {**call, "function": {**function, "arguments": arguments}}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
