"""RewardRunner with functions that raise: further attempts, errors that end the run, the log."""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.trainer_hooks.reward_functions import misspelled
from trainer_hooks.rewards import RewardFunctionError, RewardRunner, VerlReward


async def score_one(runner: RewardRunner, completion: str = "x") -> float:
    (reward,) = await runner.score(["?"], [completion], [[1]], {"ground_truth": ["a"]})
    return reward


def error_of(reward_fn: Callable[..., Any], **options: Any) -> RewardFunctionError:
    """Return the error of a function that never succeeds; two scores may fail before it."""

    async def work() -> RewardFunctionError:
        with RewardRunner(reward_fn, max_attempts=2, max_first_failures=3, **options) as runner:
            for _ in range(2):
                assert math.isnan(await score_one(runner))
            with pytest.raises(RewardFunctionError) as caught:
                await score_one(runner)
            assert runner.num_failed_calls == 6
            return caught.value

    return asyncio.run(work())


def test_max_attempts_repeats_a_failed_call_with_the_same_completions() -> None:
    seen = []

    def fails_twice(completions: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> Any:
        seen.append((list(completions), completion_ids))
        if len(seen) < 3:
            raise ConnectionError("the judge is busy")
        return [0.5] * len(completions)

    assert asyncio.run(score_one(RewardRunner(fails_twice))) == 0.5
    assert seen == [(["x"], [[1]])] * 3


def test_reward_function_that_never_succeeds_raises_with_its_own_traceback() -> None:
    error = error_of(misspelled)
    text = "".join(traceback.format_exception(error))
    assert isinstance(error.__cause__, NameError)
    assert "misspelled" in str(error)
    assert "in misspelled\n    return [float(lenght(each))" in text


def test_reward_function_error_in_a_process_has_its_traceback() -> None:
    error = error_of(misspelled, workers=1)
    text = "".join(traceback.format_exception(error))
    assert "NameError: name 'lenght' is not defined" in str(error)
    assert "in misspelled\n    return [float(lenght(each))" in text


def test_reward_function_that_has_succeeded_may_fail_any_number_of_times() -> None:
    is_broken = False

    def breaks(completions: Sequence[str]) -> list[float]:
        return [1.0 / (not is_broken)] * len(completions)

    async def work() -> None:
        nonlocal is_broken
        runner = RewardRunner(breaks, max_first_failures=1)
        assert await score_one(runner) == 1.0
        is_broken = True
        assert all([math.isnan(await score_one(runner)) for _ in range(9)])

    asyncio.run(work())


def test_failure_log_logs_an_error_once_with_its_traceback_and_then_counts_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def moody(completions: Sequence[str]) -> list[float]:
        if completions[0] == "fine":
            return [1.0]
        if completions[0] == "other":
            raise KeyError("of another kind")
        raise ValueError(f"cannot read {completions[0]}")

    async def work() -> None:
        runner = RewardRunner(moody, max_attempts=1)
        for completion in ["fine", *map(str, range(120)), "other"]:
            await score_one(runner, completion)

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    assert [record.exc_info is not None for record in caplog.records] == [True, False, False, True]
    assert "cannot read 0" in messages[0]
    shown = traceback.format_exception(*(caplog.records[0].exc_info or ()))
    assert shown[1].endswith('raise ValueError(f"cannot read {completions[0]}")\n'), (
        "no frame of ours"
    )
    assert "failed 10 times" in messages[1]
    assert "failed 100 times" in messages[2]
    assert "of another kind" in messages[3]


def test_verl_reward_raises_if_compute_score_raises_for_every_sample() -> None:
    def broken(data_source: Any, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        return float(solution_string == ground_truth)  # type: ignore[name-defined] # noqa: F821

    error = error_of(VerlReward(broken))
    assert isinstance(error.__cause__, NameError)
    assert "in broken\n" in "".join(traceback.format_exception(error))


def test_verl_reward_logs_a_compute_score_that_raises_for_one_sample(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fussy(data_source: Any, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        if solution_str == "bad":
            raise ValueError("no answer in it")
        return 1.0

    rewards = VerlReward(fussy)(["good", "bad", "good", "bad"], ground_truth=["a"] * 4)
    assert rewards == [1.0, None, 1.0, None]
    (record,) = caplog.records
    assert "no answer in it" in record.getMessage()
    assert record.exc_info is not None


def test_verl_reward_accepts_a_compute_score_of_none(caplog: pytest.LogCaptureFixture) -> None:
    assert VerlReward(lambda **sample: None)(["x"], ground_truth=["a"]) == [None]
    assert VerlReward(lambda **sample: {"score": None})(["x"], ground_truth=["a"]) == [None]
    assert not caplog.records
