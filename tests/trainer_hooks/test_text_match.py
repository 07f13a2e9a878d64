"""exact_match_reward, edit_similarity_reward, NumberReward: completions beside the answer."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import ConfigError
from trainer_hooks.rewards import NumberReward, edit_similarity_reward, exact_match_reward
from trainer_hooks.rewards.text_match import edit_distance, last_number, similarity
from trainer_hooks.train.settings import RewardSettings, RewardTerm
from trainer_hooks.train.task import reward_runner

texts = st.text("abc", max_size=7)
integers = st.integers(-(10**6), 10**6)
decimals = st.decimals(-(10**6), 10**6, places=3)
credits = st.floats(0.0, 1.0, exclude_max=True)


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


def number_reward(completion: str, answer: str | float, partial_credit: float = 0.5) -> float:
    (reward,) = NumberReward(partial_credit)([completion], [answer], [False])
    return reward


@given(decimals, decimals, credits)
def test_number_reward_is_one_for_equal_numbers_and_at_most_partial_credit_for_others(
    x: Decimal, y: Decimal, credit: float
) -> None:
    reward = number_reward(str(x), str(y), credit)
    assert reward == 1.0 if x == y else 0.0 <= reward <= credit
    assert reward == number_reward(str(y), str(x), credit)
    assert number_reward(str(x), str(x), credit) == 1.0


@given(st.integers(1, 10**6), st.lists(st.integers(0, 10**6), min_size=2, max_size=2))
def test_number_reward_of_a_number_nearer_to_the_answer_is_higher(
    answer: int, gaps: list[int]
) -> None:
    near, far = sorted(gaps)
    assert number_reward(f"{answer + near}", answer) >= number_reward(f"{answer + far}", answer)
    assert number_reward(f"{answer - near}", answer) >= number_reward(f"{answer - far}", answer)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 1000))
def test_number_reward_does_not_depend_on_the_unit(answer: int, given_: int, scale: int) -> None:
    scaled = number_reward(f"{given_ * scale}", answer * scale)
    assert scaled == pytest.approx(number_reward(f"{given_}", answer))


@given(integers, st.sampled_from(["{}", "{:,}", "{}.0", "= {}.", "1 + 2 is {} apples", "**{:,}**"]))
def test_number_reward_reads_the_last_number_however_it_is_written(n: int, form: str) -> None:
    assert number_reward(form.format(n), n) == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5-3", "3"),
        ("7 \u2212 -3", "-3"),
        ("x=\u22124", "-4"),
        ("1,234,567.50", "1234567.5"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("3.", "3"),
        ("so -.5", "-0.5"),
        ("$.25", "0.25"),
        ("wait...5", "5"),
        ("1.2.3", "3"),
        ("2.5e-3", "0.0025"),
        ("1e9999", "9999"),
        ("\u0663", None),
        ("none", None),
        ("", None),
    ],
)
def test_last_number_of_a_text(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


def test_number_reward_spreads_the_rewards_of_wrong_answers() -> None:
    rewards = NumberReward()(["81", "72 ", "8", "no idea"], ["82"] * 4, [False] * 4)
    assert rewards == pytest.approx([0.5 * 81 / 82, 0.5 * 72 / 82, 0.5 * 8 / 82, 0.0])


def test_number_reward_is_zero_for_a_cut_completion() -> None:
    assert NumberReward()(["82", "82"], ["82", 82], [True, False]) == [0.0, 1.0]


def test_number_reward_is_a_term_of_a_job_with_partial_credit_as_an_option() -> None:
    path, options = "trainer_hooks.rewards:NumberReward", {"partial_credit": 0.2}
    settings = RewardSettings(terms={"number": RewardTerm(path=path, options=options)})
    runner = reward_runner(settings)
    assert runner is not None
    columns = {"answer": ["82", 82], "is_truncated": [False, False]}
    rewards = asyncio.run(runner.score(["?", "?"], ["82", "41"], [[1], [2]], columns))
    assert rewards == [1.0, pytest.approx(0.1)]


def test_number_reward_of_numbers_beyond_a_float_is_zero_unless_they_are_equal() -> None:
    long = "9" * 5000
    assert number_reward(long, "82") == 0.0
    assert number_reward(long, long) == 1.0
    assert number_reward(long, f"{long}9") == 0.0


def test_number_reward_names_an_answer_without_a_number() -> None:
    with pytest.raises(ConfigError, match="answer='seven' has no number"):
        number_reward("7", "seven")


def test_number_reward_refuses_a_partial_credit_as_high_as_a_right_answer() -> None:
    with pytest.raises(ConfigError, match=r"partial_credit=1.0 must be a number in \[0, 1\)"):
        NumberReward(1.0)
