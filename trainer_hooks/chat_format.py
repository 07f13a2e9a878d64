"""From chat messages, or a user's text, to the text that the model goes on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]
# From chat messages to the text, or the token ids, that the model goes on from.
ChatTemplate = Callable[[Messages], str | Sequence[int]]


class ChatFormat:
    """A chat template that also takes text, as what the user says, below a system prompt.

    `tokenizer`: one of transformers with a chat template. `system_prompt` stands before messages
    that have none of their own. `options`: further arguments of the template.
    The messages of a prompt become its column `messages`.
    """

    def __init__(
        self,
        tokenizer: Any,
        system_prompt: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ConfigError for a tokenizer without a template."""
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"the tokenizer {type(tokenizer).__name__} has no chat template; set its "
                "chat_template, or use prompts as they are"
            )
        self._tokenizer, self._system_prompt = tokenizer, system_prompt
        self._options = dict(options or {})

    def messages(self, prompt: str | Messages) -> list[dict[str, Any]]:
        """The messages of a prompt, the system prompt among them."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = [dict(message) for message in prompt]
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return messages

    def __call__(self, messages: Messages) -> str:
        """The text up to where the answer begins."""
        text: str = self._tokenizer.apply_chat_template(
            self.messages(messages), tokenize=False, add_generation_prompt=True, **self._options
        )
        return text


def as_chat_template(source: Any | None) -> ChatTemplate | None:
    """A callable as it is; a transformers tokenizer as its template, up to the answer's start.

    It makes text: the engine's tokenizer adds no special tokens to those the template wrote.
    """
    if source is None or not hasattr(source, "apply_chat_template"):
        if source is not None and not callable(source):
            raise ConfigError(
                f"chat_template={source!r} is neither a callable nor a transformers tokenizer"
            )
        return source
    return lambda messages: source.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
    )
