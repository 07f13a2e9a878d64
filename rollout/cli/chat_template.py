"""Renders messages as a prompt by the chat template that a server would use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from rollout.cli.settings import UsageError
from rollout.serve.errors import ApiError
from rollout.serve.openai.chat_template import ChatTemplate, load_template
from rollout.text import as_tokenizer, has_tokenizer


def chat_template_of(directory: str) -> Callable[[list[Any]], str]:
    """Return a function that turns messages into the text that asks for the next answer.

    It reads the template when it is first called. Raises UsageError for a directory without a
    template and for messages that it refuses, ConfigError for a template that cannot be read.
    """

    @cache
    def template() -> ChatTemplate:
        tokenizer = as_tokenizer(directory) if has_tokenizer(directory) else None
        found = load_template(tokenizer, None)
        if found is None:
            raise UsageError(f"{directory} has no chat template; give prompts instead of messages")
        return found

    def apply(messages: list[Any]) -> str:
        try:
            return template().render(messages)
        except ApiError as error:
            raise UsageError(str(error)) from error

    return apply
