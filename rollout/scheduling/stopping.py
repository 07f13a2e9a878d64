"""When a request ends: a function of its tokens and, if it has stop words, of their text."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import NamedTuple

from rollout.generated_text import StopStrings


class Stop(NamedTuple):
    """Why a request ends. stop_reason: the stop token id or the stop word that ends it, None where
    an end token or the length does.
    """

    finish_reason: str
    stop_reason: int | str | None = None


class StopWord(NamedTuple):
    """A stop word, and its ids as the tokenizer encodes it."""

    word: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """The conditions that end a request. Within the first `min_tokens` generated tokens only the
    length ends it.

    end_ids: each of these token ids ends it.
    stop_token_ids: those of them that are its own, and not the model's or the tokenizer's.
    stop_words: it ends when the generated tokens end with the ids of one of them.
    max_length: of prompt and output together.
    stop_strings: finds the stop words in the generated text; None if there are none. It remembers
        what it has read, so each request needs its own.
    """

    end_ids: tuple[int, ...]
    stop_words: tuple[StopWord, ...]
    max_length: int
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: StopStrings | None = None
    min_tokens: int = 0


def check_stop(tokens: Tokens[int], num_prompt_tokens: int, rule: StopRule) -> Stop | None:
    """Return why a request ends whose newest token is `tokens[-1]`, None if it goes on.

    A token that both stops and fills the length counts as "stop". Stop words never reach into the
    prompt. Raises DetokenizeError if their text cannot be made.
    """
    if len(tokens) - num_prompt_tokens > rule.min_tokens:
        if tokens[-1] in rule.end_ids:
            return Stop("stop", tokens[-1] if tokens[-1] in rule.stop_token_ids else None)
        has_words = rule.stop_words or rule.stop_strings is not None
        if has_words and (word := _stop_word_at_end(tokens, num_prompt_tokens, rule)) is not None:
            return Stop("stop", word)
    return Stop("length") if len(tokens) >= rule.max_length else None


def _stop_word_at_end(tokens: Tokens[int], num_prompt_tokens: int, rule: StopRule) -> str | None:
    """Return the stop word that the newest token completes: in the text if it is there, else the
    first whose ids are the last ones.
    """
    strings = rule.stop_strings
    word = None if strings is None else strings.word_at_end(tokens, num_prompt_tokens)
    if word is not None:
        return word
    num_generated = len(tokens) - num_prompt_tokens
    for word, ids in rule.stop_words:
        if len(ids) <= num_generated and tuple(tokens[-len(ids) :]) == ids:
            return word
    return None
