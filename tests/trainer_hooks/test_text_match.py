"""exact_match_reward and edit_similarity_reward: completions beside the row's answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_hooks.rewards import edit_similarity_reward, exact_match_reward
from trainer_hooks.rewards.text_match import edit_distance, similarity

texts = st.text("abc", max_size=7)


def distance_by_recursion(first: str, second: str) -> int:
    """The definition, in exponential time."""
    if not first or not second:
        return len(first) + len(second)
    if first[0] == second[0]:
        return distance_by_recursion(first[1:], second[1:])
    return 1 + min(
        distance_by_recursion(first[1:], second),
        distance_by_recursion(first, second[1:]),
        distance_by_recursion(first[1:], second[1:]),
    )


@given(st.text("ab", max_size=5), st.text("ab", max_size=5))
def test_edit_distance_is_the_least_number_of_changes(first: str, second: str) -> None:
    assert edit_distance(first, second) == distance_by_recursion(first, second)


@given(texts, texts)
def test_similarity_is_symmetric_and_one_for_equal_texts_alone(first: str, second: str) -> None:
    assert similarity(first, second) == similarity(second, first)
    assert (similarity(first, second) == 1.0) == (first == second)
    assert 0.0 <= similarity(first, second) <= 1.0


def test_exact_match_reward_ignores_white_space_around_the_answer_and_wants_an_end() -> None:
    completions, answers = ["a b ", "a  b", "a b"], ["a b"] * 3
    assert exact_match_reward(completions, answers, [False, False, True]) == [1.0, 0.0, 0.0]


def test_edit_similarity_reward_is_zero_for_a_cut_completion() -> None:
    rewards = edit_similarity_reward(["abcd", "abxd", "abcd"], ["abcd"] * 3, [False, False, True])
    assert rewards == pytest.approx([1.0, 0.75, 0.0])
