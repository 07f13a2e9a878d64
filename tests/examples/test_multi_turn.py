"""The example of several turns runs, and its own checks pass."""

from __future__ import annotations

import asyncio

import pytest

from examples.multi_turn import SumTokenizer, calculator, reward, train


def test_the_example_trains_on_rollouts_of_several_turns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asyncio.run(asyncio.wait_for(train(), 120))
    shown = capsys.readouterr().out
    assert shown.count("trained at version") == 3
    assert shown.count("checked: ") == 3
    assert "3 turns" in shown
    assert "log-probs of 0 tokens of version 0 " not in shown


def test_the_tool_answers_the_last_sum() -> None:
    assert [calculator(text) for text in ("3*4=7+1", "12*12", "none+")] == ["<8>", "<144>", "<?>"]


def test_what_is_said_in_digits_is_encoded_as_a_number() -> None:
    tokenizer = SumTokenizer()
    said = tokenizer.encode("1") + tokenizer.encode("2")
    assert tokenizer.decode(said) == "12"
    assert tokenizer.encode("12") != said


def test_the_reward_wants_the_answer() -> None:
    assert reward(["7!<21>", "21", "2"], [21, 21, 21]) == [1.1, 1.0, 0.0]
