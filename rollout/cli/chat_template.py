"""Messages as the text of a prompt, by the chat template of a model's tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout.cli.settings import UsageError


def chat_template_of(directory: str) -> Callable[[list[Any]], str]:
    """Return a function that turns messages into the text that asks for the next answer.

    It loads the tokenizer when it is first called. Raises UsageError without transformers or
    without a template.
    """
    loaded: list[Any] = []

    def apply(messages: list[Any]) -> str:
        if not loaded:
            loaded.append(_load(directory))
        return str(
            loaded[0].apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    return apply


def _load(directory: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError("messages need transformers: pip install 'rollout-engine[hf]'") from error
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if tokenizer.chat_template is None:
        raise UsageError(f"the tokenizer of {directory} has no chat template; give prompts instead")
    return tokenizer
