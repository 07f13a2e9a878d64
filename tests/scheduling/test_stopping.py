"""check_stop: when a request ends, and why."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.generated_text import StopStrings
from rollout.scheduling.stopping import StopRule, StopWord, check_stop


def rule(
    end_ids: tuple[int, ...] = (),
    stop_words: tuple[tuple[int, ...], ...] = (),
    max_length: int = 100,
) -> StopRule:
    words = tuple(StopWord(str(word), word) for word in stop_words)
    return StopRule(end_ids=end_ids, stop_words=words, max_length=max_length)


def finish_reason(tokens: list[int], num_prompt: int, stop: StopRule) -> str | None:
    found = check_stop(tokens, num_prompt, stop)
    return None if found is None else found.finish_reason


@pytest.mark.parametrize(
    ("tokens", "stop", "expected"),
    [
        ([1, 2, 3], rule(), None),
        ([1, 2, 3], rule(max_length=3), "length"),
        ([1, 2, 3], rule(max_length=4), None),
        ([1, 2, 3], rule(end_ids=(9, 3)), "stop"),
        ([1, 3, 2], rule(end_ids=(3,)), None),
        ([1, 2, 3], rule(end_ids=(3,), max_length=3), "stop"),
        ([1, 2, 3], rule(stop_words=((2, 3),)), "stop"),
        ([1, 2, 3], rule(stop_words=((2, 3),), max_length=3), "stop"),
        ([1, 2, 3], rule(stop_words=((4,), (3,))), "stop"),
        ([1, 2, 3, 4], rule(stop_words=((2, 3),)), None),
        ([1, 2, 3], rule(stop_words=((1, 2, 3),)), None),
        ([1, 2, 3], rule(stop_words=((),)), None),
    ],
)
def test_one_prompt_token_then_generated_ones(
    tokens: list[int], stop: StopRule, expected: str | None
) -> None:
    assert finish_reason(tokens, 1, stop) == expected


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_only_the_length_ends_a_request_within_its_first_tokens(min_tokens: int) -> None:
    ends = StopRule(end_ids=(9,), stop_words=(), max_length=100, min_tokens=min_tokens)
    words = StopRule(
        end_ids=(), stop_words=(StopWord("nine", (9,)),), max_length=100, min_tokens=min_tokens
    )
    for num_generated in range(1, 5):
        tokens = [9] * (2 + num_generated)
        expected = "stop" if num_generated > min_tokens else None
        assert finish_reason(tokens, 2, ends) == finish_reason(tokens, 2, words) == expected
        short = replace(ends, max_length=len(tokens))
        assert finish_reason(tokens, 2, short) == (expected or "length")


def test_a_stop_word_in_the_text_precedes_one_found_by_ids() -> None:
    """The tokenizer has another token for the letters together than those of the word's ids."""
    texts = {1: "a", 2: "b", 3: "ab"}
    tokenizer: Any = SimpleNamespace(decode=lambda ids: "".join(texts[i] for i in ids))

    def stop_of(*generated: int, words: tuple[StopWord, ...] = ()) -> object:
        strings = StopStrings(tokenizer, ["ab"])
        stop = StopRule(end_ids=(), stop_words=words, max_length=100, stop_strings=strings)
        return check_stop([7, *generated], 1, stop)

    for generated in ((3,), (1, 2), (2, 1, 2)):
        assert stop_of(*generated) == ("stop", "ab")
    assert stop_of(1) is stop_of(2, 1) is None
    assert stop_of(2, 2, words=(StopWord("bb", (2, 2)),)) == ("stop", "bb")
    assert stop_of(3, words=(StopWord("three", (3,)),)) == ("stop", "ab")


def test_a_stop_word_never_reaches_into_the_prompt() -> None:
    assert finish_reason([1, 2, 3], 2, rule(stop_words=((2, 3),))) is None
    assert finish_reason([1, 2, 2, 3], 2, rule(stop_words=((2, 3),))) == "stop"


@pytest.mark.parametrize(
    ("tokens", "stop_reason"),
    [
        ([1, 2, 8], 8),
        ([1, 2, 9], None),
        ([1, 2, 7], None),
        ([1, 2, 3], "two and three"),
        ([1, 5, 3], "three"),
    ],
)
def test_a_stop_names_the_stop_token_or_the_stop_word_but_no_end_token(
    tokens: list[int], stop_reason: int | str | None
) -> None:
    """Of 7, 8 and 9, 8 alone is asked for as a stop and no end token anyway."""
    words = StopWord("two and three", (2, 3)), StopWord("three", (3,))
    stop = StopRule(end_ids=(7, 9, 8), stop_token_ids=(8,), stop_words=words, max_length=100)
    assert check_stop(tokens, 1, stop) == ("stop", stop_reason)
    assert check_stop([1, 2, 2], 1, rule(max_length=3)) == ("length", None)


token = st.integers(0, 3)


@given(
    st.lists(token, min_size=2, max_size=8),
    st.lists(token, max_size=2).map(tuple),
    st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    st.integers(1, 9),
)
def test_check_stop_agrees_with_a_search_in_the_generated_text(
    tokens, end_ids, words, max_length
) -> None:
    generated = "".join(map(str, tokens[1:]))
    stops = tokens[-1] in end_ids or any(generated.endswith("".join(map(str, w))) for w in words)
    expected = "stop" if stops else "length" if len(tokens) >= max_length else None
    assert finish_reason(tokens, 1, rule(end_ids, words, max_length)) == expected
