"""check_stop: whether a request ends, from its tokens and, for stop words, from their text.

PlannedStep calls it for tokens that may end a request. InputProcessor makes the StopRules of an
engine's requests.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import NamedTuple

from rollout.generated_text import StopStrings


class Stop(NamedTuple):
    """The end of a request.

    finish_reason: "stop", "length" or "error". stop_reason: the stop token id or stop word that
    ended it; None if an end token, the length or an error did.
    """

    finish_reason: str
    stop_reason: int | str | None = None


class StopWord(NamedTuple):
    """A stop word, and its token ids as the tokenizer encodes it."""

    word: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """The conditions that end a request.

    end_ids: token ids that end it.
    stop_token_ids: the `end_ids` that the request names, not the model or the tokenizer.
    stop_words: words that end it when the newest tokens are the word's `ids`.
    max_length: most tokens of prompt and output together.
    stop_strings: finds the stop words in the generated text; None without stop words or tokenizer.
        It keeps the state of one text, so each request needs its own.
    min_tokens: up to this number of generated tokens, only `max_length` ends the request.
    """

    end_ids: tuple[int, ...]
    stop_words: tuple[StopWord, ...]
    max_length: int
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: StopStrings | None = None
    min_tokens: int = 0


def check_stop(tokens: Tokens[int], num_prompt_tokens: int, rule: StopRule) -> Stop | None:
    """Return the end of a request by its newest token, `tokens[-1]`; None if it goes on.

    A token that both stops and fills the length counts as "stop". Stop words never reach into the
    prompt. Raises DetokenizeError if the tokenizer cannot decode the tokens.
    """
    if len(tokens) - num_prompt_tokens > rule.min_tokens:
        if tokens[-1] in rule.end_ids:
            return Stop("stop", tokens[-1] if tokens[-1] in rule.stop_token_ids else None)
        has_words = rule.stop_words or rule.stop_strings is not None
        if has_words and (word := _stop_word_at_end(tokens, num_prompt_tokens, rule)) is not None:
            return Stop("stop", word)
    return Stop("length") if len(tokens) >= rule.max_length else None


def _stop_word_at_end(tokens: Tokens[int], num_prompt_tokens: int, rule: StopRule) -> str | None:
    """Return the stop word that the newest token completes in the text, else the first stop word
    whose ids are the newest tokens, else None.
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
