"""RewardRunner: reward functions of several conventions, and the meaning of their failures."""

from __future__ import annotations

import asyncio
import functools
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from rollout.errors import ConfigError
from tests.tiny_models import IS_LONG
from tests.trainer_hooks.reward_functions import judge, lengths, matches, unruly
from trainer_hooks.rewards import (
    BatchedReward,
    ConversationalReward,
    FormatReward,
    LengthReward,
    RewardRunner,
    VerlReward,
    WeightedRewards,
    reward_metrics,
)

COLUMNS = {"answer": ["a", "b", "c"], "level": [1, 2, 3]}


def score(
    reward_fn: Callable[..., Any],
    completions: Sequence[str] = ("a", "x", ""),
    columns: dict[str, Any] = COLUMNS,
    **options: Any,
) -> list[float]:
    async def work() -> list[float]:
        with RewardRunner(reward_fn, **options) as runner:
            ids = [[len(completion)] for completion in completions]
            return await runner.score(["?"] * len(completions), completions, ids, columns)

    return asyncio.run(work())


def same(given: Sequence[float], wanted: Sequence[float]) -> bool:
    return [None if math.isnan(x) else x for x in given] == [
        None if math.isnan(x) else x for x in wanted
    ]


def test_reward_function_gets_the_columns_that_it_names() -> None:
    assert same(score(matches), [1.0, 0.0, math.nan])
    assert score(lengths) == [1.0, 1.0, 0.0]
    seen = {}

    def takes_all(**everything: Any) -> list[int]:
        seen.update(everything)
        return [0] * len(everything["completions"])

    score(takes_all)
    assert sorted(seen) == ["answer", "completion_ids", "completions", "level", "prompts"]


def test_reward_function_with_other_names_gets_arguments_by_position() -> None:
    assert score(lambda p, c, ids: [i[0] for i in ids]) == [1.0, 1.0, 0.0]
    assert score(lambda p, c, ids, level: level) == [1.0, 2.0, 3.0]


def test_reward_runner_awaits_async_functions_and_partials_of_them() -> None:
    async def slow(completions: Sequence[str], bonus: float = 0.0) -> list[float]:
        await asyncio.sleep(0.001)
        return [bonus + len(completion) for completion in completions]

    assert score(slow) == [1.0, 1.0, 0.0]
    assert score(functools.partial(slow, bonus=2.0)) == [3.0, 3.0, 2.0]


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_reward_of_none_or_nan_is_a_failed_rollout_and_never_zero(bad: float | None) -> None:
    assert same(score(lambda completions: [bad, 1, 0.5]), [math.nan, 1.0, 0.5])


def test_reward_function_that_raises_or_takes_too_long_fails_its_rollouts() -> None:
    def breaks(completions: Sequence[str]) -> list[float]:
        raise ZeroDivisionError("of the user")

    async def hangs(completions: Sequence[str]) -> list[float]:
        await asyncio.sleep(600)
        return []

    def blocks(completions: Sequence[str]) -> list[float]:
        time.sleep(1.0)
        return [0.0] * len(completions)

    for function in (breaks, hangs, blocks):
        assert all(math.isnan(reward) for reward in score(function, timeout_s=0.05))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda completions: [1.0], "1 rewards for 3 completions"),
        (lambda completions: 1.0, "not iterable"),
        (lambda completions: ["a", "b", "c"], "could not convert"),
        (lambda completions, difficulty: [], "needs difficulty; the prompts' columns are: answer"),
    ],
)
def test_reward_function_with_wrong_columns_or_results_is_a_config_error(
    wrong: Callable[..., Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        score(wrong)


@pytest.mark.parametrize("error", [ZeroDivisionError, TypeError])
def test_reward_generator_runs_in_its_thread(error: type[Exception]) -> None:
    threads = []

    def generates(completions: Sequence[str]) -> Iterator[float]:
        threads.append(threading.current_thread())
        for completion in completions:
            if completion == "bad":
                raise error("of the user")
            yield 0.5

    assert score(generates) == [0.5] * 3
    assert all(math.isnan(reward) for reward in score(generates, ["a", "bad", "b"]))
    assert threading.main_thread() not in threads


def test_blocking_reward_function_blocks_no_event_loop_and_runs_one_call_at_a_time() -> None:
    num_inside, most, loop_has_turned = 0, 0, threading.Event()

    def blocks(completions: Sequence[str]) -> list[float]:
        nonlocal num_inside, most
        assert threading.current_thread() is not threading.main_thread()
        num_inside += 1
        most = max(most, num_inside)
        assert loop_has_turned.wait(60)
        loop_has_turned.clear()
        num_inside -= 1
        return [0.0]

    async def work() -> None:
        runner = RewardRunner(blocks)
        calls = [asyncio.ensure_future(runner.score(["?"], ["x"], [[1]], {})) for _ in range(4)]
        while not all(call.done() for call in calls):
            await asyncio.sleep(0.001)
            if num_inside:
                loop_has_turned.set()
        assert [call.result() for call in calls] == [[0.0]] * 4

    asyncio.run(work())
    assert most == 1


def test_reward_workers_are_replaced_when_they_die_or_hang() -> None:
    async def work() -> None:
        with RewardRunner(unruly, workers=1, timeout_s=5.0, max_attempts=1) as runner:

            async def one(completion: str) -> float:
                return (await runner.score(["?"], [completion], [[1]], {}))[0]

            first = await one("fine")
            assert math.isnan(await one("raise"))
            assert await one("fine") == first, "an exception costs no process"
            assert math.isnan(await one("die"))
            second = await one("fine")
            assert not math.isnan(second)
            assert second != first
            if IS_LONG:
                assert math.isnan(await one("hang"))
                assert await one("fine") not in (first, second)
                waiting = asyncio.ensure_future(one("hang"))
                await asyncio.sleep(0.2)
                waiting.cancel()
                assert not math.isnan(await one("fine")), "a cancelled call gives its place back"
            assert "process ended" in str(runner.last_error) or IS_LONG

    asyncio.run(work())


def test_reward_workers_refuse_async_functions_and_unpicklable_ones() -> None:
    async def waits(completions: Sequence[str]) -> list[float]:
        return []

    with pytest.raises(ConfigError, match="async"):
        RewardRunner(waits, workers=1)
    with pytest.raises(ConfigError, match="define it at the top of a module"):
        RewardRunner(lambda completions: [], workers=1)
    with pytest.raises(ConfigError, match="workers=-1"):
        RewardRunner(lengths, workers=-1)


def test_weighted_rewards_sum_functions_and_ignore_none() -> None:
    both = WeightedRewards([matches, lengths], [2.0, 0.5])
    assert score(both) == [2.5, 0.5, 0.0]
    assert same(score(WeightedRewards([matches])), [1.0, 0.0, math.nan])
    with pytest.raises(ConfigError, match="1 reward_weights for 2 reward_funcs"):
        WeightedRewards([matches, lengths], [1.0])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda completions: [1.0], "1 rewards for 3 completions"),
        (lambda completions: [1.0] * 4, "4 rewards for 3 completions"),
        (lambda completions: None, "not iterable"),
    ],
)
def test_weighted_rewards_with_a_wrong_function_are_a_config_error(
    wrong: Callable[..., Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        score(WeightedRewards([lengths, wrong]))


def test_verl_reward_calls_compute_score_per_sample() -> None:
    rows = {
        "data_source": ["detailed", "plain", "plain"],
        "reward_model": [{"style": "rule", "ground_truth": word} for word in "abc"],
        "level": [1, 2, 3],
    }
    # The last one is not in its completion: index() raises, for this sample alone.
    assert same(score(VerlReward(judge), ["a", "xb", "?"], rows), [1.0, 1.0, math.nan])
    with pytest.raises(ConfigError, match="ground_truth or reward_model"):
        score(VerlReward(judge), ["a"], {})


@pytest.mark.parametrize("wrong", [None, "none", {"length": 1}, {"score": None}])
def test_verl_reward_without_a_number_leaves_other_samples_their_scores(wrong: Any) -> None:
    def says(data_source: Any, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
        return wrong if solution_str == "x" else 0.5

    assert same(score(VerlReward(says), columns={"ground_truth": ["a"] * 3}), [0.5, math.nan, 0.5])


def test_weighted_reward_keeps_its_terms_through_the_runner_and_a_pickle() -> None:
    rewards = score(WeightedRewards([matches, lengths], [2.0, 0.5], ["right", "long"]))
    assert [reward.terms for reward in rewards] == [  # type: ignore[attr-defined]
        {"right": 1.0, "long": 1.0},
        {"right": 0.0, "long": 1.0},
        {"long": 0.0},
    ]
    copied = pickle.loads(pickle.dumps(rewards[0]))
    assert (copied, copied.terms) == (2.5, {"right": 1.0, "long": 1.0})
    metrics = reward_metrics([*rewards, math.nan])
    assert metrics["rewards/right/mean"] == 0.5
    assert metrics["rewards/right/std"] == pytest.approx(0.5**0.5)
    assert metrics["rewards/long/mean"] == pytest.approx(2 / 3)
    assert reward_metrics([1.0]) == {}


def test_weighted_rewards_sum_async_functions_with_others() -> None:
    async def slow(completions: Sequence[str]) -> list[float]:
        await asyncio.sleep(0)
        return [10.0] * len(completions)

    assert score(WeightedRewards([slow, lengths, slow])) == [21.0, 21.0, 20.0]
    with pytest.raises(ConfigError, match="async"):
        RewardRunner(WeightedRewards([slow]), workers=1)


def test_conversational_reward_passes_messages() -> None:
    def judge_chat(prompts: Any, completions: Any) -> list[float]:
        assert prompts == [[{"role": "user", "content": "?"}]] * 3
        assert {message["role"] for (message,) in completions} == {"assistant"}
        return [float(len(completion[0]["content"])) for completion in completions]

    reward = ConversationalReward(judge_chat)
    assert score(reward) == [1.0, 1.0, 0.0]
    assert score(WeightedRewards([reward])) == [1.0, 1.0, 0.0]


def test_ready_made_rewards_of_length_and_format() -> None:
    length = LengthReward(max_tokens=4, buffer_tokens=2)
    assert length([[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]) == [0.0, 0.0, -0.5, -1.0]
    think = FormatReward()
    assert think(["<think>a\nb</think>4", "4", "<think>a", "x <think></think>"]) == [1, 0, 0, 0]
    assert FormatReward(r"\d+")(["12", "12."]) == [1, 0]
    with pytest.raises(ConfigError, match="not a regular expression"):
        FormatReward("(")


def test_batched_reward_computes_waiting_groups_together() -> None:
    sizes = []

    def judge_batch(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        sizes.append(len(completions))
        if "bad" in completions:
            raise ValueError("it is bad")
        return [float(len(p + c)) for p, c in zip(prompts, completions, strict=True)]

    async def groups() -> list[Any]:
        batched = BatchedReward(judge_batch, batch_size=4)
        calls = [batched(["p"] * 2, ["a" * i, "b"]) for i in range(5)]
        rewards = await asyncio.gather(*calls)
        assert rewards == [[1.0 + i, 2.0] for i in range(5)]
        return await asyncio.gather(
            batched(["p"], ["bad"]), batched(["p"] * 4, ["a"] * 4), return_exceptions=True
        )

    failed, later = asyncio.run(groups())
    assert max(sizes) == 4
    assert sum(sizes[:3]) == 10, "no batch waits for more groups"
    assert isinstance(failed, ValueError)
    assert later == [2.0] * 4, "it was not in that batch"
