"""rollout.generated_text: stop strings in a text that grows, and the text that is shown of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import DetokenizeError
from rollout.generated_text import StopStrings, StreamedText, generated_text
from rollout.sampling_params import SamplingParams
from rollout.text import complete_length

PIECES = ("a", "b", "ab", "aab", "bb", " ", "é", "", "abba")


class PieceTokenizer:
    """Ids stand for pieces of text of any length; 9 and 10 for the two bytes of an "é"."""

    eos_id = bos_id = None
    vocab_size = 12

    def encode(self, text: str) -> list[int]:
        return [{"a": 0, "b": 1, " ": 5, "é": 6}[letter] for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        if 11 in ids:
            raise ZeroDivisionError("there is no 11")
        parts = (PIECES[i].encode() if i < 9 else "é".encode()[i - 9 : i - 8] for i in ids)
        return b"".join(parts).decode(errors="replace")


TOKENIZER = PieceTokenizer()
ids_lists = st.lists(st.integers(0, 10), min_size=1, max_size=12)
words_lists = st.lists(st.text("abé ", min_size=1, max_size=4), min_size=1, max_size=3)


def first_stop(ids: Sequence[int], words: Sequence[str], min_tokens: int) -> int | None:
    """Return the number of tokens at which a stop string first ends in the newest token's text."""
    for count in range(1, len(ids) + 1):
        before, text = (TOKENIZER.decode(ids[:n]) for n in (count - 1, count))
        shown = [complete_length(each) for each in (before, text)]
        for word in words:
            ends = [i + len(word) for i in range(len(text)) if text.startswith(word, i)]
            if count > min_tokens and any(shown[0] < end <= shown[1] for end in ends):
                return count
    return None


@given(ids_lists, words_lists, st.integers(0, 3))
def test_a_stop_string_is_found_with_the_token_that_completes_it(ids, words, min_tokens):
    strings = StopStrings(TOKENIZER, words)
    found = (
        (count, word)
        for count in range(1, len(ids) + 1)
        if count > min_tokens and (word := strings.word_at_end([99, 99, *ids[:count]], 2))
    )
    count, word = next(found, (None, ""))
    assert count == first_stop(ids, words, min_tokens)
    if count is not None:
        assert word in words
        cut = generated_text(TOKENIZER, ids[:count], stop_words=words)
        assert TOKENIZER.decode(ids[:count]).startswith(cut + word)


@given(ids_lists, words_lists, st.integers(0, 3), st.booleans())
def test_a_stream_shows_the_text_that_the_request_will_have_and_nothing_of_a_stop(
    ids, words, min_tokens, keeps
):
    params = SamplingParams(stop_words=words, min_tokens=min_tokens, detokenize_stop_sequence=keeps)
    end = first_stop(ids, words, min_tokens)
    stops = {"stop_words": words} if end is not None and not keeps else {}
    whole = generated_text(TOKENIZER, ids[:end], **stops)
    stream = StreamedText(TOKENIZER, params)
    shown = ""
    for token_id in ids[:end]:
        shown += stream.push([token_id])
        assert whole.startswith(shown)
    assert shown + stream.finish(whole) == whole


@pytest.mark.parametrize(
    ("ids", "stops", "text"),
    [
        ([0, 3], {"stop_words": ["ab"]}, "aa"),
        ([0, 1, 8], {"stop_words": ["bab", "ba"]}, "a"),
        ([2, 1, 8], {"stop_words": ["b"]}, "abba"),
        ([0, 5, 1], {"stop_word_ids": [[5, 1]]}, "a"),
        ([0, 1], {"stop_token_ids": [1]}, "a"),
        ([0, 1], {"stop_token_ids": [0]}, "ab"),
        ([], {"stop_words": ["a"], "stop_word_ids": [[0]], "stop_token_ids": [0]}, ""),
    ],
)
def test_the_text_ends_before_the_stop_that_its_last_token_completes(ids, stops, text):
    assert generated_text(TOKENIZER, ids, **stops) == text


def test_what_may_begin_a_stop_string_waits_until_it_is_decided():
    stream = StreamedText(TOKENIZER, SamplingParams(stop_words=["abba"]))
    assert [stream.push([i]) for i in (5, 0, 1, 1, 1)] == [" ", "", "", "", "abbb"]


class MarkerTokenizer:
    """Characters are ids; "#" is a special token, which has no text, and "A" is written as "a"."""

    eos_id = bos_id = None
    vocab_size = 128

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text.replace("A", "a")]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i != ord("#"))


@pytest.mark.parametrize(
    ("word", "tokens", "shown"),
    [
        ("#\n", "x\ny\nz#\n", "x\ny\nz"),
        ("#\n", "x#y", "xy"),
        ("A", "xay", "x"),
        ("A#", "bananas", "bananas"),
        ("A#", "bana#", "ban"),
    ],
)
def test_a_stop_word_whose_tokens_read_otherwise_ends_a_stream_by_its_tokens_only(
    word, tokens, shown
):
    stream = StreamedText(MarkerTokenizer(), SamplingParams(stop_words=[word]))
    pieces = [stream.push([ord(token)]) for token in tokens]
    assert "".join(pieces) == shown


def test_a_token_that_only_reads_like_a_written_stop_word_does_not_end_a_stream():
    class Cased(PieceTokenizer):
        def encode(self, text: str) -> list[int]:
            return [{"B": 1}[letter] for letter in text]

    stream = StreamedText(Cased(), SamplingParams(stop_words=["B"]))
    assert [stream.push([i]) for i in (0, 2, 0, 1, 0)] == ["a", "ab", "a", "", ""]


def test_a_tokenizer_that_raises_says_on_what_and_ends_a_stream_only():
    with pytest.raises(DetokenizeError, match=r"2 tokens.*no 11"):
        generated_text(TOKENIZER, [0, 11])
    with pytest.raises(DetokenizeError, match="token 11"):
        StopStrings(TOKENIZER, ["b"]).word_at_end([0, 11], 0)
    stream = StreamedText(TOKENIZER, SamplingParams(stop_words=["b"]))
    assert [stream.push([i]) for i in (0, 11, 0)] == ["a", "", ""]
    assert stream.finish(None) == ""
