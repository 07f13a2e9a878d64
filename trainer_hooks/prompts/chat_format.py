"""ChatFormat: renders chat messages, or a user's text, into the text that the model continues.

Used by `trainer_hooks.prompts.sources`, `trainer_hooks.prompts.rows`, `trainer_hooks.train.task`
and `trainer_hooks.train.prompts`. A ChatFormat keeps no state between prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.errors import ConfigError
from rollout.text import RenderedText

Messages = Sequence[Mapping[str, Any]]
# Renders chat messages into the text, or the token ids, that the model continues.
ChatTemplate = Callable[[Messages], str | Sequence[int]]


class ChatFormat:
    """A chat template that takes chat messages, or a text as the only message of a user.

    `tokenizer`: transformers tokenizer with a chat template.
    `system_prompt`: text of a first message for prompts without a system message, or None.
    `options`: further arguments of the template.
    `examples`: pairs of a user's text and the answer, which become turns before each prompt.
    Raises ConfigError for a tokenizer without a chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        system_prompt: str | None = None,
        options: Mapping[str, Any] | None = None,
        examples: Sequence[tuple[str, str]] = (),
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"the tokenizer {type(tokenizer).__name__} has no chat template; set its "
                "chat_template, or use prompts as they are"
            )
        self._tokenizer, self._system_prompt = tokenizer, system_prompt
        self._options = dict(options or {})
        self._examples = [
            {"role": role, "content": text}
            for pair in examples
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]

    def messages(self, prompt: str | Messages) -> list[dict[str, Any]]:
        """Return the messages of a prompt, with the system prompt and the examples added."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = [dict(message) for message in prompt]
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        start = 1 if messages[0]["role"] == "system" else 0
        return messages[:start] + [dict(turn) for turn in self._examples] + messages[start:]

    def render(self, messages: Messages) -> RenderedText:
        """Return the text of `messages` up to where the answer begins. Adds no messages."""
        return RenderedText(
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **self._options
            )
        )

    def __call__(self, messages: Messages) -> RenderedText:
        """Return the text of `messages`, with the system prompt and the examples added."""
        return self.render(self.messages(messages))


def as_chat_template(source: Any | None) -> ChatTemplate | None:
    """Return a template made from a callable or from a transformers tokenizer.

    Returns `source` itself if it is None or a ChatFormat. Special tokens are not added to a
    template's text later, since the template writes them. Raises ConfigError for another object.
    """
    if source is None or isinstance(source, ChatFormat):
        return source
    if hasattr(source, "apply_chat_template"):
        return lambda messages: RenderedText(
            source.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        )
    if not callable(source):
        raise ConfigError(
            f"chat_template={source!r} is neither a callable nor a transformers tokenizer"
        )
    return lambda messages: _as_rendered(source(messages))


def _as_rendered(prompt: str | Sequence[int]) -> str | Sequence[int]:
    return RenderedText(prompt) if isinstance(prompt, str) else prompt
