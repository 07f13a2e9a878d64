"""The word tasks: right answers, held-out rows that no training sees, other rows for each seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollout.errors import ConfigError
from trainer_hooks.train.word_tasks import DIGITS, NUM_PROMPTS, number_words, reversed_lists

TASKS = (reversed_lists, number_words)


@pytest.mark.parametrize("task", TASKS)
def test_word_tasks_never_train_on_a_held_out_prompt(task: Callable[..., Any]) -> None:
    held_out = task("held_out", 0)
    assert len({item.prompt for item in held_out}) == 200
    assert [item.prompt for item in task("held_out", 5)] == [item.prompt for item in held_out]
    for seed in range(3):
        trained = task("train", seed)
        assert len(trained) == NUM_PROMPTS
        assert {item.prompt for item in held_out}.isdisjoint(item.prompt for item in trained)


@pytest.mark.parametrize("task", TASKS)
def test_word_tasks_of_another_seed_have_other_prompts(task: Callable[..., Any]) -> None:
    first, again, other = (task("train", seed) for seed in (0, 0, 1))
    assert first == again
    assert [item.prompt for item in first[:50]] != [item.prompt for item in other[:50]]


def test_reversed_lists_answers_are_the_words_in_reverse_order() -> None:
    for item in reversed_lists("train", 0, num_words=5)[:100]:
        words = item.prompt.split(", ")
        assert len(set(words)) == 5
        assert item.columns["answer"].split(", ") == words[::-1]


def test_number_words_answers_are_the_digits() -> None:
    for item in number_words("train", 0, num_digits=5)[:100]:
        digits = [str(DIGITS.index(word)) for word in item.prompt.split(" ")]
        assert item.columns["answer"] == "".join(digits)
        assert len(digits) == 5


def test_word_tasks_refuse_sizes_that_have_too_few_rows() -> None:
    with pytest.raises(ConfigError, match="num_digits=2 gives 81 rows"):
        number_words("train", 0, num_digits=2)
    with pytest.raises(ConfigError, match="num_words=0"):
        reversed_lists("train", 0, num_words=0)
    with pytest.raises(ConfigError, match=r"num_words=1 gives .* num_held_out=1000"):
        reversed_lists("train", 0, num_words=1, num_held_out=1000)
