"""as_item: makes a PromptItem from a row of a file or dataset, through a chat template.

Used by `trainer_hooks.prompts.sources`. `as_item` keeps no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.chat_messages import plain_message
from rollout.errors import ConfigError
from rollout.utf8_lines import lone_surrogate
from trainer_hooks.prompts.chat_format import ChatFormat, ChatTemplate
from trainer_hooks.prompts.ledger import PromptItem

_MAX_SHOWN = 60  # characters of a prompt in an error


def as_item(
    values: Mapping[str, Any],
    prompt_column: str,
    template: ChatTemplate | None,
    place: str,
    *,
    is_arrow: bool = False,
) -> PromptItem:
    """Return a row as a PromptItem.

    `values`: the row, by column name.
    `template`: a ChatFormat renders both texts and messages, and adds the column `messages`.
    Another template renders only messages.
    `place`: text that names the row in errors.
    `is_arrow`: True for a row from Arrow. Arrow gives all objects of a column the same keys, with
    null for missing values. Keys that are null are removed from tool calls.
    If the column `reward_model` has a `ground_truth`, that value also becomes the column
    `ground_truth`, unless the row has one.
    Raises ConfigError for a prompt that is not text, token ids or messages, for messages without a
    template, for messages that the template refuses, and for half a surrogate pair in any column.
    """
    if prompt_column not in values:
        raise ConfigError(f"{place} has no column {prompt_column!r}; it has {', '.join(values)}")
    if (text := lone_surrogate(values)) is not None:
        raise ConfigError(
            f"{place} holds half a surrogate pair, {_shown(text)}; write the whole character, or "
            "leave it out"
        )
    columns = {name: value for name, value in values.items() if name != prompt_column}
    scoring = columns.get("reward_model")
    if isinstance(scoring, Mapping) and "ground_truth" in scoring:
        columns.setdefault("ground_truth", scoring["ground_truth"])
    prompt, place = values[prompt_column], f"{place}, column {prompt_column!r}"
    if _are_messages(prompt):
        prompt = [_plain_message(message, place, is_arrow) for message in prompt]
    if (
        isinstance(template, ChatFormat)
        and prompt
        and (isinstance(prompt, str) or _are_messages(prompt))
    ):
        columns["messages"] = template.messages(prompt)
        return PromptItem(_rendered(columns["messages"], template.render, place), columns)
    return PromptItem(_as_prompt(prompt, template, place), columns)


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict)
            and "role" in message
            and not message.keys().isdisjoint(("content", "tool_calls"))
            for message in value
        )
    )


def _plain_message(message: Mapping[str, Any], place: str, is_arrow: bool) -> dict[str, Any]:
    if is_arrow and isinstance(calls := message.get("tool_calls"), list):
        # Arguments that are JSON text keep their nulls.
        message = {**message, "tool_calls": _without_nulls(calls)}
    try:
        plain = plain_message(message)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error
    if not plain.get("tool_calls"):  # Arrow cannot tell none from an empty list
        plain.pop("tool_calls", None)
    return plain


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value


def _as_prompt(value: Any, template: ChatTemplate | None, place: str) -> str | Sequence[int]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        if all(isinstance(token, int) and not isinstance(token, bool) for token in value):
            return value
        if _are_messages(value):
            if template is None:
                raise ConfigError(
                    f"{place} holds chat messages; pass chat_template, a callable or a "
                    "transformers tokenizer"
                )
            return _rendered(value, template, place)
    raise ConfigError(
        f"{place} is {_shown(value)}; it must be text, token ids or messages with role and content"
    )


def _rendered(
    messages: list[dict[str, Any]], template: ChatTemplate, place: str
) -> str | Sequence[int]:
    try:
        return template(messages)
    except Exception as error:  # a template is a program and may raise any error
        raise ConfigError(
            f"{place}: the chat template refuses the messages {_shown(messages)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
