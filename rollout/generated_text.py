"""The text of generated tokens: stop strings, streamed text, and the text of a finished record.

Used by `rollout.engine.input_processor` and `rollout.scheduling.stopping` (StopStrings),
`rollout.apis.streaming`, `rollout.coordinator.client.pending_requests`, `rollout.serve.samples`,
`rollout.serve.openai` and `trainer_hooks.rewards.scoring`. `add_text` changes the given record.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollout.errors import DetokenizeError
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.sampling_params import SamplingParams
from rollout.text import (
    IncrementalDetokenizer,
    PromptIds,
    Tokenizer,
    complete_length,
    context_of,
    text_after,
)

_logger = logging.getLogger(__name__)


class StopStrings:
    """Finds stop strings in the text of one request's tokens while they are generated. It keeps the
    end of the text so far. The work per token does not grow with the text."""

    def __init__(self, tokenizer: Tokenizer, words: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        self._words = tuple(words)
        self._num_kept = max(map(len, words)) - 1
        self._tail = ""  # the last characters, where a stop string may have begun
        self._num_read = 0

    def word_at_end(self, tokens: Sequence[int], start: int) -> str | None:
        """Return the stop string that the last token completes in the text of `tokens[start:]`.

        Returns the one that begins first if the token completes several, and None if it completes
        none. `start` is the number of prompt tokens. Each call must pass the tokens of the previous
        call and at least one more. Raises DetokenizeError if the tokenizer cannot decode the
        tokens.
        """
        detokenizer = self._detokenizer
        if detokenizer is None:
            detokenizer = self._detokenizer = _detokenizer_after(self._tokenizer, tokens[:start])
        found = None
        for token in tokens[start + self._num_read :]:
            text = self._tail + _pushed(detokenizer, token)
            found = _find_stop(text, self._words, len(self._tail))
            self._tail = text[max(0, len(text) - self._num_kept) :]
            self._num_read += 1
        return None if found is None else found[1]


class StreamedText:
    """Streams the text of one request's tokens, and holds back text that may begin a stop word.

    A stop word is found in the text, and also by its token ids, which may decode to another text.
    The streamed text ends before a stop, or where the tokenizer raises. `prompt` has the ids before
    the generated tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt: PromptIds = ()
    ) -> None:
        keeps_all = params.detokenize_stop_sequence
        self._words = () if keeps_all else tuple(params.stop_words or ())
        self._stop_token_ids = () if keeps_all else params.stop_token_ids or ()
        encoded = (tuple(tokenizer.encode(word)) for word in self._words)
        self._word_matches = _WordMatches([word for word in encoded if word])
        self._min_tokens = params.min_tokens
        self._detokenizer = _detokenizer_after(tokenizer, prompt)
        self._num_tokens = self._num_decided = self._num_shown = 0
        self._held = ""  # may be the beginning of a stop word
        self._has_ended = False

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens. Returns the new text that cannot belong to a stop word, possibly ""."""
        shown = "".join(self._push_one(token_id) for token_id in ids)
        self._num_shown += len(shown)
        return shown

    def finish(self, generated_text: str | None) -> str:
        """Return the part of `generated_text`, the whole text, that `push` has not returned."""
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
        start = self._word_matches.push(token_id, self._num_decided + len(self._held))
        found = _find_stop(text, self._words, len(self._held)) if may_stop else None
        end = None if found is None else found[0]
        if end is None and may_stop and start is not None:
            end = start - self._num_decided
        self._has_ended = end is not None
        if end is None:
            end = self._num_clear(text)
        self._held = text[end:]
        self._num_decided += end
        return text[:end]

    def _num_clear(self, text: str) -> int:
        """Return the number of leading characters of `text` that cannot belong to a stop word."""
        begun_at = self._word_matches.first_start()
        num_clear = len(text) - self._num_undecided(text)
        return num_clear if begun_at is None else min(num_clear, begun_at - self._num_decided)

    def _num_undecided(self, text: str) -> int:
        """Return the number of trailing characters of `text` that may begin a stop string."""
        longest = max(map(len, self._words), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(w.startswith(text[-n:]) for w in self._words)), 0)


class TextOffsets:
    """Computes where each generated token begins in the generated text, in characters. Tokens that
    form one character together all have the offset of that character. `start` is the offset of the
    first token. Without a tokenizer every token has the offset `start`."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: PromptIds = (), start: int = 0) -> None:
        self._detokenizer = None if tokenizer is None else _detokenizer_after(tokenizer, prompt)
        self._end = start

    def push(self, ids: Iterable[int]) -> list[int]:
        """Add tokens and return their offsets. Raises DetokenizeError if a token cannot be
        decoded."""
        offsets = []
        for token_id in ids:
            offsets.append(self._end)
            if self._detokenizer is not None:
                self._end += len(_pushed(self._detokenizer, token_id))
        return offsets


class _WordMatches:
    """Finds the stop words whose token ids the newest ids complete or begin. The start of a word is
    an index into the generated text, in characters."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._words = words
        self._begun: list[tuple[tuple[int, ...], int, int]] = []  # word, number of ids found, start

    def push(self, token_id: int, text_start: int) -> int | None:
        """Add an id whose text begins at `text_start`. Returns the start of the longest word that
        the id completes; None if it completes no word."""
        tried = [*self._begun, *((word, 0, text_start) for word in self._words)]
        found = [(word, n + 1, start) for word, n, start in tried if word[n] == token_id]
        self._begun = [(word, n, start) for word, n, start in found if n < len(word)]
        return min((start for word, n, start in found if n == len(word)), default=None)

    def first_start(self) -> int | None:
        """Return the start of the first incomplete word; None if no word has begun."""
        return min((start for _, _, start in self._begun), default=None)


def generated_text(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    prompt: PromptIds = (),
    *,
    stop_words: Sequence[str] = (),
    stop_word_ids: Sequence[Sequence[int]] = (),
    stop_token_ids: Sequence[int] = (),
) -> str:
    """Return the text that generated tokens add to the prompt's text, without a stop at its end.
    Pass stop words, their ids and stop tokens only if a stop ended the request. Raises
    DetokenizeError if the tokenizer cannot decode the tokens."""
    decoded = _Decoded(tokenizer, prompt)
    text = decoded.text(tokens)
    if stop_words:
        # Earlier stop words did not end the request, because of min_tokens.
        num_before = complete_length(decoded.text(tokens[:-1]))
        found = _find_stop(text, stop_words, num_before)
        if found is not None:
            return text[: found[0]]
    for word in stop_word_ids:
        if list(tokens[-len(word) :]) == list(word):
            return decoded.text(tokens[: -len(word)])
    if stop_token_ids and tokens and tokens[-1] in stop_token_ids:
        return decoded.text(tokens[:-1])
    return text


def shown_text(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    prompt: PromptIds = (),
    *,
    finish_reason: str | None,
    stop_word_ids: Sequence[Sequence[int]] | None,
    sampling_params: Mapping[str, Any],
) -> str:
    """Return the text of a finished request as its user gets it, without the stop at its end.

    The stop is kept if `detokenize_stop_sequence` is set. `stop_word_ids` has the ids of each stop
    word. `sampling_params` is the result of SamplingParams.serialize. Raises DetokenizeError if the
    tokenizer cannot decode the tokens.
    """
    if finish_reason != "stop" or sampling_params.get("detokenize_stop_sequence"):
        return generated_text(tokenizer, tokens, prompt)
    return generated_text(
        tokenizer,
        tokens,
        prompt,
        stop_words=sampling_params.get("stop_words") or (),
        stop_word_ids=stop_word_ids or (),
        stop_token_ids=sampling_params.get("stop_token_ids") or (),
    )


def _find_stop(text: str, words: Sequence[str], num_before: int) -> tuple[int, str] | None:
    """Return (start, word) of the first stop string that ends after the first `num_before`
    characters. Returns None if there is no such stop string. Of several with the same start, the
    first of `words` is returned."""
    starts = (text.find(word, max(0, num_before - len(word) + 1)) for word in words)
    found = [(start, index) for index, start in enumerate(starts) if start >= 0]
    if not found:
        return None
    start, index = min(found)
    return start, words[index]


class _Decoded:
    """Decodes tokens that follow a prompt. Errors of the tokenizer become DetokenizeErrors."""

    def __init__(self, tokenizer: Tokenizer, prompt: PromptIds) -> None:
        self._tokenizer, self._context = tokenizer, _context_of(tokenizer, prompt)

    def text(self, ids: Sequence[int]) -> str:
        try:
            return text_after(self._tokenizer, self._context, ids)
        except Exception as fault:  # the tokenizer is the user's: it may raise anything
            raise DetokenizeError(
                f"the tokenizer cannot decode {len(ids)} tokens: {fault!r}"
            ) from fault


def _detokenizer_after(tokenizer: Tokenizer, prompt: PromptIds) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tokenizer, _context_of(tokenizer, prompt))


def _context_of(tokenizer: Tokenizer, prompt: PromptIds) -> list[int]:
    """Return the last ids of `prompt` as context; [] if the tokenizer cannot decode them."""
    try:
        return context_of(tokenizer, prompt)
    except Exception:  # the tokenizer is the user's: it may raise anything
        return []


def _pushed(detokenizer: IncrementalDetokenizer, token_id: int) -> str:
    try:
        return detokenizer.push([token_id])
    except Exception as fault:  # a tokenizer of the user may raise anything
        raise DetokenizeError(
            f"fix the tokenizer: decode of token {token_id} raised {fault!r}"
        ) from fault


def add_text(record: DynamicInferenceRequestRecord, tokenizer: Tokenizer | None) -> None:
    """Set `generated_text` of a record's segments, so that `merge` joins them to the whole text.

    The text lacks the stop word or stop token at its end, unless `detokenize_stop_sequence` is set.
    The tokens include the stop. If the tokenizer raises, the segments get no text, and the error is
    added to the record's events. Does nothing without a tokenizer or without sampling params, if
    the text is already set, or if an earlier call failed.
    """
    segments, last = record.requests, record.current
    written = [s for s in segments if s.num_generated_tokens] or [last]
    is_known = written[-1].generated_text is not None or any(s.has_no_text for s in segments)
    if tokenizer is None or is_known or last.sampling_params is None:
        return
    try:
        text = shown_text(
            tokenizer,
            [token for segment in written for token in segment.generated_tokens],
            segments[0].prompt_tokens,
            finish_reason=last.finish_reason,
            stop_word_ids=last.stop_word_ids,
            sampling_params=last.sampling_params.serialize(),
        )
    except DetokenizeError as error:
        _logger.warning("request %d has no text: %s", record.request_id, error)
        last.add_text_error(error)
        return
    # The text is not a join of the segments' texts: two segments may share a character.
    for segment in written:
        segment.generated_text = ""
    written[-1].generated_text = text
