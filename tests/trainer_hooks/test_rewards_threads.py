"""RewardRunner without workers: one call at a time, across cancelled callers and event loops."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator, Sequence

import pytest

from trainer_hooks.rewards import RewardRunner

# SOON_S: wait for an event that must not come. TIMEOUT_S: more than a call without blocking needs.
# LATE_S: limit on a test that hangs.
SOON_S, TIMEOUT_S, LATE_S = 0.05, 1.0, 60.0


class Gate:
    """A reward function that blocks at "wait" until it is opened, and counts concurrent calls."""

    def __init__(self) -> None:
        self.has_entered, self.is_open = threading.Event(), threading.Event()
        self.scored: list[str] = []
        self.num_inside = self.most_inside = 0

    def __call__(self, completions: Sequence[str]) -> list[float]:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        self.has_entered.set()
        if "wait" in completions:
            assert self.is_open.wait(LATE_S)
        self.num_inside -= 1
        self.scored += completions
        return [1.0] * len(completions)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.is_open.set()


async def score_one(runner: RewardRunner, completion: str) -> float:
    rewards = runner.score(["?"], [completion], [[1]], {})
    return (await asyncio.wait_for(rewards, LATE_S))[0]


async def cancelled_inside(runner: RewardRunner, gate: Gate) -> None:
    """Make a call, and cancel its caller while the function blocks at the gate."""
    call = asyncio.ensure_future(score_one(runner, "wait"))
    while not gate.has_entered.is_set():
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()


async def scored_once_the_gate_opens(runner: RewardRunner, gate: Gate) -> list[str]:
    """Return the completions scored by the time that the call after "wait" has its reward."""
    following = asyncio.ensure_future(score_one(runner, "next"))
    await asyncio.wait([following], timeout=SOON_S)
    assert not following.done()
    gate.is_open.set()
    assert await following == 1.0
    return gate.scored


def test_cancelled_reward_call_keeps_its_permit_until_its_function_returns(gate: Gate) -> None:
    async def work() -> None:
        runner = RewardRunner(gate)
        await cancelled_inside(runner, gate)
        assert await scored_once_the_gate_opens(runner, gate) == ["wait", "next"]

    asyncio.run(work())
    assert gate.most_inside == 1


def test_reward_call_of_a_closed_event_loop_keeps_its_permit(gate: Gate) -> None:
    runner = RewardRunner(gate)
    asyncio.run(cancelled_inside(runner, gate))
    assert asyncio.run(scored_once_the_gate_opens(runner, gate)) == ["wait", "next"]
    assert gate.most_inside == 1


@pytest.mark.parametrize("loops", ["one loop", "two loops"])
def test_cancelled_reward_call_that_takes_too_long_loses_its_permit(gate: Gate, loops: str) -> None:
    runner = RewardRunner(gate, timeout_s=TIMEOUT_S)

    async def both() -> float:
        await cancelled_inside(runner, gate)
        return await score_one(runner, "next")

    if loops == "one loop":
        assert asyncio.run(both()) == 1.0
    else:
        asyncio.run(cancelled_inside(runner, gate))
        assert asyncio.run(score_one(runner, "next")) == 1.0
    assert gate.scored == ["next"]


def test_reward_call_that_takes_too_long_does_not_block_later_ones(gate: Gate) -> None:
    async def work() -> list[float]:
        runner = RewardRunner(gate, timeout_s=TIMEOUT_S)
        completions = ["wait", "next", "last"]
        return await asyncio.gather(*[score_one(runner, each) for each in completions])

    first, *others = asyncio.run(work())
    assert math.isnan(first)
    assert others == [1.0, 1.0]
    assert gate.scored == ["next", "last"]


def test_reward_call_that_still_runs_is_not_repeated(gate: Gate) -> None:
    runner = RewardRunner(gate, timeout_s=SOON_S, max_attempts=3)
    assert math.isnan(asyncio.run(score_one(runner, "wait")))
    assert runner.num_failed_calls == 1


def test_late_return_of_a_reward_call_releases_no_other_permit(gate: Gate) -> None:
    second = Gate()

    def two_gates(completions: Sequence[str]) -> list[float]:
        return (second if "second" in completions else gate)([*completions, "wait"])[:1]

    async def work() -> None:
        runner = RewardRunner(two_gates, timeout_s=TIMEOUT_S)
        assert math.isnan(await score_one(runner, "first"))
        calls = [asyncio.ensure_future(score_one(runner, name)) for name in ("second", "third")]
        while not second.has_entered.is_set():
            await asyncio.sleep(0)
        gate.is_open.set()
        while not gate.scored:
            await asyncio.sleep(0)
        await asyncio.wait(calls, timeout=SOON_S)
        assert "third" not in gate.scored
        second.is_open.set()
        assert await asyncio.gather(*calls) == [1.0, 1.0]

    asyncio.run(work())


def test_reward_runner_skips_a_cancelled_waiting_call(gate: Gate) -> None:
    async def work() -> None:
        runner = RewardRunner(gate)
        calls = [
            asyncio.ensure_future(score_one(runner, name)) for name in ("wait", "left", "next")
        ]
        while not gate.has_entered.is_set():
            await asyncio.sleep(0)
        calls[1].cancel()
        gate.is_open.set()
        assert [await calls[0], await calls[2]] == [1.0, 1.0]
        assert gate.scored == ["wait", "next"]

    asyncio.run(work())


def test_reward_runner_skips_waiting_calls_of_a_closed_event_loop(gate: Gate) -> None:
    runner = RewardRunner(gate)

    async def begin() -> list[asyncio.Task[float]]:
        calls = [asyncio.ensure_future(score_one(runner, name)) for name in ("wait", "left")]
        while not gate.has_entered.is_set():
            await asyncio.sleep(0)
        return calls

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # it would log calls left pending
    calls = loop.run_until_complete(begin())
    loop.close()
    assert asyncio.run(scored_once_the_gate_opens(runner, gate)) == ["wait", "next"]
    assert gate.most_inside == 1
    assert [call.done() for call in calls] == [False, False]


def test_reward_runner_serves_one_event_loop_after_another() -> None:
    runner = RewardRunner(Gate())

    async def epoch() -> list[float]:
        return await asyncio.gather(*[score_one(runner, str(i)) for i in range(4)])

    assert [asyncio.run(epoch()) for _ in range(3)] == [[1.0] * 4] * 3


def test_reward_runner_serves_two_event_loops_at_once(gate: Gate) -> None:
    runner, scored = RewardRunner(gate), []
    thread = threading.Thread(target=lambda: scored.append(asyncio.run(score_one(runner, "wait"))))
    thread.start()
    assert gate.has_entered.wait(LATE_S)
    assert asyncio.run(scored_once_the_gate_opens(runner, gate)) == ["wait", "next"]
    assert gate.most_inside == 1
    thread.join(LATE_S)
    assert scored == [1.0]


def test_reward_function_that_raises_stop_iteration_only_fails_its_rollouts() -> None:
    def first_of(completions: Sequence[str]) -> list[float]:
        return [float(next(iter(completion))) for completion in completions]

    async def work() -> None:
        runner = RewardRunner(first_of)
        assert math.isnan(await asyncio.wait_for(score_one(runner, ""), LATE_S))
        assert "StopIteration" in str(runner.last_error)
        assert await score_one(runner, "7") == 7.0

    asyncio.run(work())


async def until_it_is_warned_of(caplog: pytest.LogCaptureFixture, count: int = 1) -> list[str]:
    while True:
        warnings = [r.getMessage() for r in caplog.records if "still runs after" in r.getMessage()]
        if len(warnings) >= count:
            return warnings
        await asyncio.sleep(0)


def test_warn_after_s_names_a_hanging_call_with_its_sample_at_doubling_times(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang() -> float:
        runner = RewardRunner(gate, warn_after_s=1e-3)
        call = asyncio.ensure_future(score_one(runner, "wait"))
        behind = asyncio.ensure_future(score_one(runner, "behind"))  # waits for its turn: not named
        for message in await asyncio.wait_for(until_it_is_warned_of(caplog, 2), LATE_S):
            assert message.startswith("reward function Gate still runs after 0.00")
            assert "'wait' to the prompt '?'" in message
            assert "timeout_s" in message
        gate.is_open.set()
        return await call + await behind

    assert asyncio.run(hang()) == 2.0


def test_warn_after_s_names_a_hanging_async_call(caplog: pytest.LogCaptureFixture) -> None:
    async def hang() -> list[float]:
        may_end = asyncio.Event()

        async def judge(completions: Sequence[str]) -> list[float]:
            await may_end.wait()
            return [0.5] * len(completions)

        runner = RewardRunner(judge, warn_after_s=1e-3)
        call = asyncio.ensure_future(runner.score(["?"], ["a" * 1000], [[1]], {}))
        (message, *_) = await asyncio.wait_for(until_it_is_warned_of(caplog), LATE_S)
        assert "reward function judge" in message
        assert len(message) < 600
        may_end.set()
        return await call

    assert asyncio.run(hang()) == [0.5]


def test_warn_after_s_none_or_a_quick_call_warns_of_nothing(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.is_open.set()
    for warn_after_s in (60.0, None):
        runner = RewardRunner(gate, warn_after_s=warn_after_s)
        assert asyncio.run(score_one(runner, "a")) == 1.0
    assert not caplog.records
