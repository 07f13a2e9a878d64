"""Group filters and curricula of a producer, in virtual time."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from benchmarks.virtual_time import run_virtually
from rollout.errors import ConfigError
from tests.trainer_hooks.producer.fake_llm import FakeLLM, levels, random_delays, train
from trainer_hooks import Curriculum, PromptHistory, PromptLedger, RewardRangeFilter, ScoredGroup
from trainer_hooks.producer import AsyncRolloutProducer, ProducerError

PROMPTS = [{"prompt": [i, 50 + i], "level": i} for i in range(12)]


async def by_level(completion_ids: Any, level: list[int]) -> list[float]:
    """Return a prompt's level as its rewards, with small differences."""
    return [level[0] + i / 1000 for i, _ in enumerate(completion_ids)]


def producer_of(llm: FakeLLM, **changes: Any) -> AsyncRolloutProducer:
    options: dict[str, Any] = {
        "prompts": PROMPTS, "reward_fn": by_level, "group_size": 3, "batch_groups": 2,
        "max_staleness_versions": 0, "shuffle": False,
    }  # fmt: skip
    return AsyncRolloutProducer(llm, **(options | changes))


def test_reward_range_filter_replaces_groups_and_counts_them_by_reason() -> None:
    async def work() -> None:
        llm, bounds = FakeLLM(), RewardRangeFilter(low=1.5, high=9.5)
        async with producer_of(llm, group_filters=[bounds], num_epochs=1) as producer:
            batches = await train(llm, producer)
            assert [levels(batch) for batch in batches] == [[2, 3], [4, 5], [6, 7], [8, 9]]
            assert producer.ledger.consumed == {"trained": 8, "filtered": 4}
        first = batches[0].metrics
        assert first["rollouts/filtered/too_hard"] == first["rollouts/num_filtered_groups"] == 2
        assert "rollouts/filtered/too_easy" not in first

    run_virtually(work())


def test_group_filter_gets_the_group_and_the_history_of_its_prompt() -> None:
    seen: list[tuple[int, PromptHistory]] = []

    def every_other_epoch(group: ScoredGroup, history: PromptHistory) -> str | None:
        seen.append((group.item.columns["level"], history))
        return "trained_before" if history.num_trained > history.num_filtered else None

    async def work() -> None:
        llm = FakeLLM()
        options = {"prompts": PROMPTS[:4], "num_epochs": 3, "drop_zero_variance": True}
        async with producer_of(llm, group_filters=[every_other_epoch], **options) as producer:
            batches = await train(llm, producer)
        assert [levels(batch) for batch in batches] == [[0, 1], [2, 3], [0, 1], [2, 3]]
        assert producer.ledger.consumed == {"trained": 8, "filtered": 4}
        level, history = seen[-1]
        assert (history.num_trained, history.num_filtered, history.last_version) == (1, 1, 2)
        assert history.last_reward == pytest.approx(level + 0.001)

    run_virtually(work())


def test_error_of_a_group_filter_is_raised_at_the_next_batch_and_loses_no_prompt() -> None:
    def broken(group: ScoredGroup, history: PromptHistory) -> str | None:
        raise KeyError("difficulty")

    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, group_filters=[broken]) as producer:
            with pytest.raises(KeyError, match="difficulty"):
                await anext(producer)
        assert producer.ledger.consumed == {}
        assert producer.ledger.given_back["error"] >= 1

    run_virtually(work())


def test_max_refills_error_names_the_reasons_of_group_filters() -> None:
    async def work() -> None:
        options = {"group_filters": [RewardRangeFilter(low=99.0)], "max_refills": 3}
        async with producer_of(FakeLLM(), **options) as producer:
            with pytest.raises(ProducerError, match=r"4 groups were filtered \(4 too_hard\)"):
                await anext(producer)

    run_virtually(work())


def test_reward_range_filter_refuses_low_above_high() -> None:
    with pytest.raises(ConfigError, match=r"low=0.9 must be below high=0.1"):
        RewardRangeFilter(low=0.9, high=0.1)


def test_producer_draws_prompts_by_its_curriculum_also_after_a_resume() -> None:
    """Low levels come first; the run is killed after each batch and resumed from its state."""
    curriculum = Curriculum(weight=lambda index, history: 1000.0 ** -(index // 4))
    options: dict[str, Any] = {"curriculum": curriculum, "shuffle": True, "num_epochs": 1}

    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, **options) as producer:
            whole = [levels(batch) for batch in await train(llm, producer)]
        assert [sorted(whole[i] + whole[i + 1]) for i in (0, 2, 4)] == [
            [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]
        ]  # fmt: skip
        state, cut = None, []
        for _ in whole:
            llm = FakeLLM()
            producer = producer_of(llm, **options)
            if state is not None:
                producer.load_state_dict(json.loads(json.dumps(state)))
            async with producer:
                (batch,) = await train(llm, producer, 1)
            cut.append(levels(batch))
            state = producer.state_dict()
        assert cut == whole

    run_virtually(work())


def test_producer_refuses_a_curriculum_beside_a_ledger() -> None:
    curriculum = Curriculum(weight=lambda index, history: 1.0)
    with pytest.raises(ConfigError, match="prompts is a ledger; give the curriculum to the ledger"):
        producer_of(FakeLLM(), prompts=PromptLedger(PROMPTS), curriculum=curriculum)


@pytest.mark.parametrize("order", ["admission", "ready"])
def test_error_of_a_curriculum_is_raised_at_the_next_batch(order: Any) -> None:
    """A filtered group is replaced while the trainer is busy, by a prompt of the new weights."""

    def weight(index: int, history: PromptHistory) -> float:
        return -1.0 if history.num_trained else 1.0

    def odd(group: ScoredGroup, history: PromptHistory) -> str | None:
        return "odd" if group.item.columns["level"] % 2 else None

    async def work() -> None:
        llm = FakeLLM(random_delays(random.Random(0), 20.0))
        options: dict[str, Any] = {"shuffle": True, "max_staleness_versions": 2, "order": order}
        options |= {"curriculum": Curriculum(weight=weight), "group_filters": [odd]}
        async with producer_of(llm, **options) as producer:
            await anext(producer)
            await asyncio.sleep(500.0)
            with pytest.raises(ConfigError, match="weight of row"):
                await anext(producer)

    run_virtually(work())
