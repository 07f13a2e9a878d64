"""When a request ends: a function of its tokens and, if it has stop words, of their text."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from rollout.generated_text import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """What ends a request. Only the length ends it within its first `min_tokens` generated tokens.

    end_ids: each of these token ids ends it.
    stop_words: it ends when the generated tokens end with one of these sequences of ids.
    max_length: of prompt and output together.
    stop_strings: finds the stop words in the generated text; None if there are none. It remembers
        what it has read, so each request needs its own.
    """

    end_ids: tuple[int, ...]
    stop_words: tuple[tuple[int, ...], ...]
    max_length: int
    stop_strings: StopStrings | None = None
    min_tokens: int = 0


def finish_reason(tokens: Tokens[int], num_prompt_tokens: int, rule: StopRule) -> str | None:
    """Return "stop", "length", or None if a request goes on whose newest token is `tokens[-1]`.

    A token that both stops and fills the length counts as "stop". Stop words never reach into the
    prompt. Raises DetokenizeError if their text cannot be made.
    """
    if len(tokens) - num_prompt_tokens > rule.min_tokens:
        if tokens[-1] in rule.end_ids:
            return "stop"
        has_words = rule.stop_words or rule.stop_strings is not None
        if has_words and _ends_with_stop_word(tokens, num_prompt_tokens, rule):
            return "stop"
    return "length" if len(tokens) >= rule.max_length else None


def _ends_with_stop_word(tokens: Tokens[int], num_prompt_tokens: int, rule: StopRule) -> bool:
    num_generated = len(tokens) - num_prompt_tokens
    for word in rule.stop_words:
        if len(word) <= num_generated and tuple(tokens[-len(word) :]) == word:
            return True
    strings = rule.stop_strings
    return strings is not None and strings.end_with(tokens, num_prompt_tokens)
