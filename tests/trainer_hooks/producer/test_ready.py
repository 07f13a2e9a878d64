"""ReadyOrder: batches of whichever groups are finished, in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.virtual_time import run_virtually
from rollout.errors import ConfigError
from rollout.step.seeds import mix_seed
from tests.trainer_hooks.producer.fake_llm import FakeLLM, levels, train
from trainer_hooks.producer import AsyncRolloutProducer

PROMPTS = [{"prompt": [i, 50 + i], "level": i} for i in range(12)]


def producer_of(
    llm: FakeLLM, reward_s: Callable[[int], float], **changes: Any
) -> AsyncRolloutProducer:
    """Return a producer whose generation takes 3 seconds and whose reward takes
    `reward_s(level)`.
    """

    async def reward(completion_ids: Any, level: list[int]) -> list[float]:
        await asyncio.sleep(reward_s(level[0]))
        return [float(ids[0]) for ids in completion_ids]

    options: dict[str, Any] = {"order": "ready", "shuffle": False, "num_epochs": 1}
    return AsyncRolloutProducer(llm, PROMPTS, reward, 2, 2, 1, **(options | changes))


def test_ready_order_does_not_wait_for_the_first_prompt() -> None:
    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, lambda level: 100.0 if level == 0 else 0.0) as producer:
            first, second = await train(llm, producer, 2, step_s=10.0)
            assert (levels(first), levels(second)) == ([1, 2], [3, 4])
            assert first.metrics["timing_s/batch_wait"] == 3.0
            assert second.metrics["timing_s/batch_wait"] == 0.0
            assert producer.ledger.num_out > 0, "the slow prompt is begun again"

    run_virtually(work())


def test_ready_order_samples_a_group_too_old_for_any_batch_again() -> None:
    num_slow = 0

    def slow_once(level: int) -> float:
        nonlocal num_slow
        num_slow += level == 0
        return 100.0 if level == 0 and num_slow == 1 else 0.0

    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, slow_once) as producer:
            batches = await train(llm, producer, step_s=10.0)
            place = next(i for i, batch in enumerate(batches) if 0 in levels(batch))
            group = batches[place].groups[0]
            assert (group.item.columns["level"], group.num_reissues) == (0, 1)
            assert batches[place].metrics["rollouts/num_reissued_groups"] >= 1
            assert sum(b.metrics["rollouts/num_stale_groups"] for b in batches) >= 1
            assert producer.ledger.given_back["stale"] >= 1
            assert producer.ledger.consumed == {"trained": 12}
        first, again = (mix_seed(mix_seed(0, 0, 0, attempt), 0, 0) for attempt in (0, 3))
        assert {first, again} <= set(llm.seeds)

    run_virtually(work())


def test_ready_order_waits_for_a_prompt_after_max_reissues() -> None:
    async def work() -> None:
        llm = FakeLLM()
        producer = producer_of(
            llm, lambda level: 40.0 if level == 0 else 0.0, max_reissues=2, num_epochs=None
        )
        async with producer:
            batches = await train(llm, producer, 6, step_s=10.0)
        waits = [batch.metrics["timing_s/batch_wait"] for batch in batches]
        place = next(i for i, batch in enumerate(batches) if 0 in levels(batch))
        assert waits[place] > 30.0
        assert [wait for wait in waits[1:] if wait > 0.0] == [waits[place]]
        assert batches[place].groups[0].num_reissues == 2
        assert all(int(batch.rollouts.policy_lag_BT.max()) <= 1 for batch in batches)

    run_virtually(work())


def test_ready_order_limits_its_groups_while_no_batch_is_taken() -> None:
    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, lambda level: 0.0) as producer:
            await anext(producer)
            await asyncio.sleep(1000.0)
            assert llm.num_started == 2 * 4, "the groups of this batch and the next"
            assert llm.num_running == 0

    run_virtually(work())


def test_ready_order_begins_few_excess_groups_if_all_are_in_time() -> None:
    async def reward(completion_ids: Any) -> list[float]:
        return [0.0, 1.0]

    async def work() -> None:
        llm, prompts = FakeLLM(), [[i, i] for i in range(64)]
        async with AsyncRolloutProducer(llm, prompts, reward, 2, 8, 1, order="ready") as producer:
            await train(llm, producer, 8, step_s=10.0)
            num_started = llm.num_started
            batches = await train(llm, producer, 16, step_s=10.0)
        assert all(batch.metrics["timing_s/batch_wait"] == 0.0 for batch in batches)
        # Of 20 groups that may be open, 8 are used.
        assert (llm.num_started - num_started) / (16 * 8 * 2) <= 1.5

    run_virtually(work())


def test_reissues_of_a_prompt_survive_a_restart() -> None:
    async def state_of(num_batches: int) -> Any:
        llm = FakeLLM()
        async with producer_of(llm, lambda level: 100.0 if level == 0 else 0.0) as producer:
            await train(llm, producer, num_batches, step_s=10.0)
            return json.loads(json.dumps(producer.state_dict()))

    async def work() -> None:
        state = await state_of(3)
        llm = FakeLLM(weights_version=3)
        resumed = producer_of(llm, lambda level: 0.0)
        resumed.load_state_dict(state)
        async with resumed:
            batch = await anext(resumed)
        assert levels(batch)[0] == 0
        assert batch.groups[0].num_reissues >= 2

    run_virtually(work())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"order": "sorted"}, "order='sorted' is not known; choose 'admission' or 'ready'"),
        ({"max_reissues": -1}, "max_reissues=-1 must be 0 or more"),
    ],
)
def test_order_that_cannot_work_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        producer_of(FakeLLM(), lambda level: 0.0, **changes)
