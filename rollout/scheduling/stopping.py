"""check_stop: decides whether a request ends with its newest token.

`rollout.scheduling.planned_step` and `rollout_vllm.pipeline` call it.
`rollout.engine.input_processor` creates the StopRules. check_stop changes only the state of
`StopRule.stop_strings`.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import NamedTuple

from rollout.generated_text import StopStrings


class Stop(NamedTuple):
    """The end of a request.

    finish_reason: "stop", "length" or "error".
    stop_reason: the stop token id or stop word that ended the request; None for any other end.
    """

    finish_reason: str
    stop_reason: int | str | None = None


class StopWord(NamedTuple):
    """A stop word, and the token ids to which the tokenizer encodes it."""

    word: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """The conditions that end a request.

    end_ids: token ids that end the request.
    stop_token_ids: the `end_ids` that the request itself names.
    stop_words: words that end the request when the newest tokens are the word's `ids`.
    max_length: maximum number of tokens in prompt and output together.
    stop_strings: finds stop words in the generated text; None if there are no stop words or no
        tokenizer. It keeps the state of one text, so each request needs its own.
    min_tokens: number of generated tokens up to which only `max_length` ends the request.
    """

    end_ids: tuple[int, ...]
    stop_words: tuple[StopWord, ...]
    max_length: int
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: StopStrings | None = None
    min_tokens: int = 0


def check_stop(tokens: Tokens[int], num_prompt_tokens: int, rule: StopRule) -> Stop | None:
    """Return how the newest token, `tokens[-1]`, ends the request; None if the request continues.

    A token that both stops the request and reaches `max_length` counts as "stop". Stop words never
    include tokens of the prompt. Raises DetokenizeError if the tokenizer cannot decode the tokens.
    """
    if len(tokens) - num_prompt_tokens > rule.min_tokens:
        if tokens[-1] in rule.end_ids:
            return Stop("stop", tokens[-1] if tokens[-1] in rule.stop_token_ids else None)
        has_words = rule.stop_words or rule.stop_strings is not None
        if has_words and (word := _stop_word_at_end(tokens, num_prompt_tokens, rule)) is not None:
            return Stop("stop", word)
    return Stop("length") if len(tokens) >= rule.max_length else None


def _stop_word_at_end(tokens: Tokens[int], num_prompt_tokens: int, rule: StopRule) -> str | None:
    """Return the stop word that the newest token completes; None if there is none. A stop word in
    the text comes before a stop word whose ids are the newest tokens."""
    strings = rule.stop_strings
    word = None if strings is None else strings.word_at_end(tokens, num_prompt_tokens)
    if word is not None:
        return word
    num_generated = len(tokens) - num_prompt_tokens
    for word, ids in rule.stop_words:
        if len(ids) <= num_generated and tuple(tokens[-len(ids) :]) == ids:
            return word
    return None
