"""The text of generated tokens: where a stop string ends it, and what of it may be shown so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout.errors import DetokenizeError
from rollout.sampling_params import SamplingParams
from rollout.text import IncrementalDetokenizer, Tokenizer, complete_length


class StopStrings:
    """Looks for stop strings in the text of one request's tokens, as they come.

    The state is that of the text so far; the work per token does not grow with it.
    """

    def __init__(self, tokenizer: Tokenizer, words: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._words = tuple(words)
        self._num_kept = max(map(len, words)) - 1
        self._tail = ""  # the last characters, in which a stop string may have begun
        self._num_read = 0

    def end_with(self, tokens: Sequence[int], start: int) -> bool:
        """Whether the last token completes a stop string in the text of `tokens[start:]`.

        Each call brings tokens that follow those of the call before. Raises DetokenizeError.
        """
        is_found = False
        for token in tokens[start + self._num_read :]:
            text = self._tail + _pushed(self._detokenizer, token)
            is_found = _find_stop(text, self._words, len(self._tail)) is not None
            self._tail = text[max(0, len(text) - self._num_kept) :]
            self._num_read += 1
        return is_found


class StreamedText:
    """The text of one request's tokens as they come, without what may belong to a stop string.

    A tokenizer that raises ends the text; `finish` then has nothing to add.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        keeps_all = params.detokenize_stop_sequence
        words = () if keeps_all else params.stop_words or ()
        self._has_ended = False
        try:
            # A stop word also matches by its tokens, whose text may be written otherwise.
            written = [_decoded(tokenizer, tokenizer.encode(word)) for word in words]
        except DetokenizeError:
            self._has_ended, written = True, []
        self._words = tuple(word for word in (*words, *written) if word)
        self._stop_token_ids = () if keeps_all else params.stop_token_ids or ()
        self._min_tokens = params.min_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._num_tokens = self._num_shown = 0
        self._held = ""  # may be the beginning of a stop string

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that is decided now, possibly none."""
        shown = "".join(self._push_one(token_id) for token_id in ids)
        self._num_shown += len(shown)
        return shown

    def finish(self, generated_text: str | None) -> str:
        """What is left of the request's whole text, None if there is none."""
        return (generated_text or "")[self._num_shown :]

    def _push_one(self, token_id: int) -> str:
        if self._has_ended:
            return ""
        self._num_tokens += 1
        may_stop = self._num_tokens > self._min_tokens
        if may_stop and token_id in self._stop_token_ids:
            self._has_ended = True
            return ""
        try:
            text = self._held + _pushed(self._detokenizer, token_id)
        except DetokenizeError:
            self._has_ended = True
            return ""
        end = _find_stop(text, self._words, len(self._held)) if may_stop else None
        self._has_ended = end is not None
        if end is None:
            end = len(text) - self._num_undecided(text)
        self._held = text[end:]
        return text[:end]

    def _num_undecided(self, text: str) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        longest = max(map(len, self._words), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(w.startswith(text[-n:]) for w in self._words)), 0)


def generated_text(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    *,
    stop_words: Sequence[str] = (),
    stop_word_ids: Sequence[Sequence[int]] = (),
    stop_token_ids: Sequence[int] = (),
) -> str:
    """The text of all generated tokens, without the stop that they end with and what follows it.

    Give the stops only of a request that stopped and is to be shown without. Raises
    DetokenizeError.
    """
    text = _decoded(tokenizer, tokens)
    if stop_words:
        # Earlier tokens may hold one, too: they were kept by min_tokens.
        num_before = complete_length(_decoded(tokenizer, tokens[:-1]))
        start = _find_stop(text, stop_words, num_before)
        if start is not None:
            return text[:start]
    for word in stop_word_ids:
        if list(tokens[-len(word) :]) == list(word):
            return _decoded(tokenizer, tokens[: -len(word)])
    if stop_token_ids and tokens and tokens[-1] in stop_token_ids:
        return _decoded(tokenizer, tokens[:-1])
    return text


def _find_stop(text: str, words: Sequence[str], num_before: int) -> int | None:
    """Where the first stop string begins that ends beyond the first `num_before` characters."""
    starts = (text.find(word, max(0, num_before - len(word) + 1)) for word in words)
    return min((start for start in starts if start >= 0), default=None)


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    try:
        return tokenizer.decode(ids)
    except Exception as fault:  # the tokenizer is the user's: it may raise anything
        raise DetokenizeError(
            f"the tokenizer cannot decode {len(ids)} tokens: {fault!r}"
        ) from fault


def _pushed(detokenizer: IncrementalDetokenizer, token_id: int) -> str:
    try:
        return detokenizer.push([token_id])
    except Exception as fault:  # as above
        raise DetokenizeError(f"the tokenizer cannot decode token {token_id}: {fault!r}") from fault
