"""When a request is done: a pure function of its tokens."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """`end_ids` stop at once; `stop_words` are token id suffixes of the generated part;
    `max_length` is prompt + output.
    """

    end_ids: tuple[int, ...]
    stop_words: tuple[tuple[int, ...], ...]
    max_length: int


def finish_reason(tokens: Tokens[int], num_prompt_tokens: int, rule: StopRule) -> str | None:
    """ "stop", "length" or None for a request whose newest token is `tokens[-1]`.

    A token that both stops and fills the length counts as "stop". Stop words never reach into the
    prompt.
    """
    if tokens[-1] in rule.end_ids:
        return "stop"
    num_generated = len(tokens) - num_prompt_tokens
    for word in rule.stop_words:
        if len(word) <= num_generated and tuple(tokens[-len(word) :]) == word:
            return "stop"
    return "length" if len(tokens) >= rule.max_length else None
