"""AsyncRolloutProducer: its batches, prompts, errors and end, in virtual time."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest

from benchmarks.virtual_time import run_virtually
from rollout import LLM
from rollout.errors import ConfigError
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import mix_seed
from tests.trainer_hooks.producer.fake_llm import FakeLLM, levels, train
from trainer_hooks.producer import AsyncRolloutProducer, ProducerError
from trainer_hooks.producer.producer import Order
from trainer_hooks.prompts.curriculum import Curriculum
from trainer_hooks.prompts.ledger import PromptLedger
from trainer_hooks.rewards import RewardFunctionError

PROMPTS = [{"prompt": [i, 50 + i], "level": i} for i in range(12)]


async def first_token(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    return [float(ids[0]) for ids in completion_ids]


def producer_of(llm: Any, reward_fn: Any = first_token, **changes: Any) -> AsyncRolloutProducer:
    options: dict[str, Any] = {
        "prompts": PROMPTS,
        "group_size": 3,
        "batch_groups": 2,
        "max_staleness_versions": 1,
        "shuffle": False,
    }
    return AsyncRolloutProducer(llm, reward_fn=reward_fn, **(options | changes))


def test_training_batch_has_groups_in_the_order_of_the_prompts() -> None:
    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm) as producer:
            first, second = await train(llm, producer, 2)
        assert (levels(first), levels(second)) == ([0, 1], [2, 3])
        assert (first.group_size, len(first), len(first.rollouts)) == (3, 2, 6)
        assert (first.version, second.version) == (0, 1)
        assert first.rollouts.train_version == 0
        assert first.rollouts.tokens_BT[3].tolist()[:2] == [1, 51]
        rewards = [reward for group in first.groups for reward in group.rewards]
        assert first.rollouts.rewards_B.tolist() == rewards
        assert first.metrics["timing_s/batch_wait"] == 3.0, "one second per token"
        assert first.metrics["timing_s/group_generate_mean"] == 3.0
        assert second.metrics["timing_s/batch_wait"] == 0.0, "it was made beside the first"
        assert first.metrics["rollouts/num_waiting_batches"] == 1

    run_virtually(work())


@pytest.mark.parametrize("order", ["admission", "ready"])
def test_progress_counts_samples_before_their_group_ends(order: Order) -> None:
    seconds = iter([1.0, 3.0, 5.0, 1.0, 3.0, 9.0])  # of the samples of two groups

    async def work() -> None:
        llm = FakeLLM(lambda: next(seconds), num_tokens=1)
        own = {"order": order, "max_staleness_versions": 0, "oversample_groups": 0}
        async with producer_of(llm, num_epochs=1, prompts=PROMPTS[:2], **own) as producer:
            seen = []
            for wait_s in (0.5, 1.5, 2.0, 2.0):  # so at 0.5, 2, 4 and 6 seconds
                await asyncio.sleep(wait_s)
                seen.append((producer.progress, producer.reward_so_far))
            assert [progress for progress, _ in seen] == [(0, 6), (2, 6), (4, 6), (5, 6)]
            assert all(math.isnan(reward) for _, reward in seen[:3])
            batch = await anext(producer)
            assert seen[3][1] == batch.groups[0].mean_reward, "its group is scored"
            assert producer.progress == (0, 6), "no batch follows"

    run_virtually(work())


def test_reward_so_far_leaves_out_groups_beyond_the_next_batch() -> None:
    async def work() -> None:
        own = {"order": "ready", "max_staleness_versions": 1, "oversample_groups": 0}
        async with producer_of(FakeLLM(), **own) as producer:
            await asyncio.sleep(30.0)  # the groups of two batches are finished
            reward, batch = producer.reward_so_far, await anext(producer)
            assert reward == pytest.approx(fmean(group.mean_reward for group in batch.groups))
            assert batch.metrics["rollouts/num_waiting_batches"] >= 1

    run_virtually(work())


def test_progress_of_an_llm_that_reports_no_samples_counts_groups() -> None:
    class Unreporting(FakeLLM):
        async def generate(self, prompts: Any, sampling_params: Any = None, n: int = 1) -> Any:  # type: ignore[override]
            return await super().generate(prompts, sampling_params, n)

    async def score_slowly(completion_ids: Sequence[Any]) -> list[float]:
        await asyncio.sleep(100.0)
        return [1.0] * len(completion_ids)

    async def work() -> None:
        async with producer_of(Unreporting(), score_slowly, max_staleness_versions=0) as producer:
            await asyncio.sleep(4.0)
            assert producer.progress == (6, 6), "all samples have ended, none is scored"

    run_virtually(work())


def test_progress_restarts_with_a_group_that_is_sampled_again() -> None:
    started = []

    def fails(seed: int) -> bool:
        started.append(seed)
        return len(started) <= 3  # the first group's first attempt

    async def work() -> None:
        llm = FakeLLM(fails=fails)
        own = {"batch_groups": 1, "max_staleness_versions": 0}
        async with producer_of(llm, **own) as producer:
            await asyncio.sleep(4.0)
            assert producer.progress == (0, 3)
            assert (await anext(producer)).metrics["rollouts/num_retried_groups"] == 1

    run_virtually(work())


def test_producer_seeds_depend_only_on_prompt_and_sample() -> None:
    async def seeds(bound: int, delay_s: float) -> list[int]:
        llm = FakeLLM(lambda: delay_s)
        async with producer_of(llm, max_staleness_versions=bound, seed=9) as producer:
            await train(llm, producer, 4)
        return llm.seeds[: 4 * 6]

    expected = [mix_seed(mix_seed(9, 0, i, 0), 0, sample) for i in range(8) for sample in range(3)]
    assert run_virtually(seeds(0, 1.0)) == expected
    assert run_virtually(seeds(2, 0.1)) == expected


def test_producer_gives_the_same_prompts_other_seeds_in_a_second_epoch() -> None:
    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, prompts=PROMPTS[:2], num_epochs=2) as producer:
            batches = await train(llm, producer)
        assert [levels(batch) for batch in batches] == [[0, 1], [0, 1]]
        assert len(set(llm.seeds)) == len(llm.seeds) == 12

    run_virtually(work())


def test_producer_raises_if_no_batch_can_come() -> None:
    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, max_staleness_versions=0) as producer:
            await anext(producer)
            with pytest.raises(ProducerError, match=r"no batch can come at version 0.*=0 no more"):
                await anext(producer)
            await llm.push()
            assert (await anext(producer)).version == 1

    run_virtually(work())


def test_version_timeout_s_waits_for_an_update_in_progress() -> None:
    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, max_staleness_versions=0, version_timeout_s=9.0) as producer:
            await anext(producer)
            pushing = asyncio.ensure_future(llm.push(lag_s=5.0))
            assert (await anext(producer)).version == 1
            await pushing
            with pytest.raises(ProducerError, match="no batch can come at version 1"):
                await anext(producer)

    run_virtually(work())


def test_refresh_version_begins_a_batch_before_it_is_requested() -> None:
    async def work() -> None:
        llm = FakeLLM(weights_version=7)
        async with producer_of(llm, max_staleness_versions=0) as producer:
            assert (await anext(producer)).version == 7
            await llm.push()
            assert producer.refresh_version() == 8
            await asyncio.sleep(10.0)
            batch = await anext(producer)
            assert batch.metrics["timing_s/batch_wait"] == 0.0
            assert (batch.version, batch.admitted_at_version) == (8, 8)

    run_virtually(work())


def test_producer_gives_a_prompt_drawn_twice_in_an_epoch_other_seeds() -> None:
    async def seeds() -> list[int]:
        llm = FakeLLM()
        curriculum = Curriculum(weight=lambda index, history: index == 3, with_replacement=True)
        async with producer_of(llm, shuffle=True, curriculum=curriculum) as producer:
            for batch in await train(llm, producer, 2):
                assert levels(batch) == [3, 3]
        return llm.seeds

    drawn = run_virtually(seeds())
    assert len(set(drawn)) == len(drawn) >= 2 * 2 * 3


def test_min_valid_samples_keeps_a_group_with_enough_valid_rollouts() -> None:
    async def work() -> None:
        bad = mix_seed(mix_seed(0, 0, 0, 0), 0, 1)
        llm = FakeLLM(fails=lambda seed: seed == bad)
        async with producer_of(llm) as producer:
            batch = await anext(producer)
        rewards_B = batch.rollouts.rewards_B
        assert rewards_B.isnan().tolist() == [False, True] + [False] * 4
        assert batch.rollouts.mask_BT.any(dim=1).tolist() == [True, False] + [True] * 4
        assert batch.metrics["rollouts/num_failed_samples"] == 1

    run_virtually(work())


def test_min_valid_samples_repeats_a_group_with_other_seeds() -> None:
    num_calls = Counter()

    async def fussy(completion_ids: Any, level: list[int]) -> list[float | None]:
        num_calls[level[0]] += 1
        if level[0] == 1 and num_calls[1] == 1:
            return [1.0, None, math.nan]
        return [1.0] * len(level)

    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, fussy, max_staleness_versions=0) as producer:
            batch = await anext(producer)
            assert levels(batch) == [0, 1]
            assert batch.metrics["rollouts/num_retried_groups"] == 1
            assert llm.seeds[-1] == mix_seed(mix_seed(0, 0, 1, 1), 0, 2)

    run_virtually(work())


def test_max_attempts_exhausted_replaces_the_prompt_within_its_batch() -> None:
    async def hates_two(completion_ids: Any, level: list[int]) -> list[float | None]:
        return [None if level[0] == 2 else 1.0] * len(level)

    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, hates_two, max_attempts=2, num_epochs=1) as producer:
            batches = await train(llm, producer)
            assert sorted(level for batch in batches for level in levels(batch)) == [
                level for level in range(12) if level != 2
            ]
            assert [len(batch) for batch in batches] == [2] * 5 + [1]
            assert producer.ledger.consumed == {"trained": 11, "failed": 1}
            fates = Counter()
            for batch in batches:
                fates.update(batch.metrics)
            assert fates["rollouts/num_failed_groups"] == 1
            assert fates["rollouts/num_retried_groups"] == 1
            assert fates["rollouts/num_refilled_groups"] == 1

    run_virtually(work())


def test_producer_repeats_a_failed_score_without_another_generation() -> None:
    num_calls = Counter()

    async def busy(completion_ids: Any, level: list[int]) -> list[float]:
        num_calls[level[0]] += 1
        if num_calls[level[0]] < 3:
            raise ConnectionError("the judge is busy")
        return [1.0] * len(level)

    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, busy, max_staleness_versions=0) as producer:
            batch = await anext(producer)
        assert not batch.rollouts.rewards_B.isnan().any()
        assert batch.metrics["rollouts/num_retried_groups"] == 0
        assert (llm.num_started, num_calls) == (2 * 3, {0: 3, 1: 3})

    run_virtually(work())


def test_producer_replaces_and_counts_a_group_whose_score_fails() -> None:
    async def hates_one(completion_ids: Any, level: list[int]) -> list[float]:
        if level[0] == 1:
            raise RuntimeError("no reward for this")
        return [1.0] * len(level)

    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, hates_one, max_staleness_versions=0) as producer:
            batch = await anext(producer)
            assert levels(batch) == [0, 2]
            assert batch.metrics["rollouts/num_failed_groups"] == 1
            assert batch.metrics["rollouts/num_reward_failed_groups"] == 1
            assert llm.num_started == 3 * 3, "1 was generated once"

    run_virtually(work())


def test_producer_raises_for_a_broken_reward_function_before_a_second_batch() -> None:
    async def misspelled(completion_ids: Any) -> list[float]:
        return [float(ids[0]) for ids in completoin_ids]  # type: ignore[name-defined] # noqa: F821

    async def work() -> None:
        llm = FakeLLM(iter([1.0] * 30 + [2.0] * 10_000).__next__)
        options = {"batch_groups": 4, "max_staleness_versions": 0, "num_epochs": None}
        async with producer_of(llm, misspelled, **options) as producer:
            with pytest.raises(RewardFunctionError) as caught:
                await anext(producer)
        assert isinstance(caught.value.__cause__, NameError)
        assert caught.value.__cause__.__traceback__ is not None
        assert llm.num_started <= 3 * (4 + 3), "a batch, and the groups that replaced the first"
        assert producer.ledger.num_out == 0

    run_virtually(work())


def test_drop_zero_variance_replaces_groups_with_equal_rewards() -> None:
    async def by_level(completion_ids: Any, level: list[int]) -> list[float]:
        return [float(i) if level[0] % 3 else 1.0 for i in range(len(level))]

    async def work() -> None:
        llm = FakeLLM()
        options = {"drop_zero_variance": True, "num_epochs": 1, "max_staleness_versions": 0}
        async with producer_of(llm, by_level, **options) as producer:
            batches = await train(llm, producer)
            assert [levels(batch) for batch in batches] == [[1, 2], [4, 5], [7, 8], [10, 11]]
            assert producer.ledger.consumed == {"trained": 8, "filtered": 4}

    run_virtually(work())


def test_max_refills_exceeded_is_an_error_and_the_next_call_continues() -> None:
    is_flat = True

    async def flat(completion_ids: Any) -> list[float]:
        return [1.0 if is_flat else float(i) for i, _ in enumerate(completion_ids)]

    async def work() -> None:
        nonlocal is_flat
        llm = FakeLLM()
        options = {"drop_zero_variance": True, "max_refills": 4, "max_staleness_versions": 0}
        async with producer_of(llm, flat, **options) as producer:
            with pytest.raises(ProducerError, match=r"max_refills=4.* 5 groups were filtered"):
                await anext(producer)
            is_flat = False
            assert len(await anext(producer)) == 2

    run_virtually(work())


def test_min_valid_samples_failures_are_logged_at_the_first_and_the_error_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scores_nothing(completion_ids: Any) -> list[float | None]:
        return [None] * len(completion_ids)

    async def work() -> None:
        options = {"max_refills": 4, "max_staleness_versions": 0}
        async with producer_of(FakeLLM(), scores_nothing, **options) as producer:
            said = r"5 failed \(the last one: the reward was None or NaN\)"
            with pytest.raises(ProducerError, match=said):
                await anext(producer)

    with caplog.at_level(logging.WARNING):
        run_virtually(work())
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.partition(" is left out ")[2] == (
        "(1 so far): 0 of its 3 samples have a reward after max_attempts=3, fewer than "
        "min_valid_samples=2; the first without one: the reward was None or NaN"
    )


def test_max_refills_error_has_the_traceback_of_the_reward_function() -> None:
    num_calls = 0

    async def breaks(completion_ids: Any) -> list[float]:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 2:
            raise ConnectionError("the judge is gone")
        return [1.0] * len(completion_ids)

    async def work() -> None:
        llm = FakeLLM()
        options = {"max_refills": 4, "max_staleness_versions": 0}
        async with producer_of(llm, breaks, **options) as producer:
            await anext(producer)
            await llm.push()
            with pytest.raises(
                ProducerError, match=r"5 failed .*test_producer.*judge is gone"
            ) as caught:
                await anext(producer)
        assert isinstance(caught.value.__cause__, ConnectionError)

    run_virtually(work())


@pytest.mark.parametrize("bound", [0, 1])
def test_max_refills_counts_batches_that_grow_too_old(bound: int) -> None:
    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, max_staleness_versions=bound, max_refills=1) as producer:
            await asyncio.sleep(9.0)
            assert llm.num_running == 0
            await llm.push()
            await llm.push()
            with pytest.raises(ProducerError, match=r"max_refills=1 .* 2 grew too old"):
                await anext(producer)
            batch = await anext(producer)
            assert (levels(batch), batch.version) == ([0, 1], 2)

    run_virtually(work())


def test_oversample_groups_are_aborted_and_their_prompts_given_back() -> None:
    async def work() -> None:
        llm = FakeLLM()
        delays = {0: 1.0, 1: 30.0, 2: 2.0, 3: 3.0}

        async def slow(completion_ids: Any, level: list[int]) -> list[float]:
            await asyncio.sleep(delays.get(level[0], 1.0))
            return [1.0] * len(level)

        options = {"oversample_groups": 2, "max_staleness_versions": 0, "num_epochs": 1}
        async with producer_of(llm, slow, **options) as producer:
            first = await anext(producer)
            assert levels(first) == [0, 2]
            assert first.metrics["rollouts/num_aborted_groups"] == 2
            assert producer.ledger.given_back == {"aborted": 2}
            await llm.push()
            assert levels(await anext(producer)) == [4, 5], "1 and 3 were begun again, slow again"
            await llm.push()
            rest = await train(llm, producer)
            assert sum(len(batch) for batch in rest) == 8
            assert producer.ledger.consumed == {"trained": 12}

    run_virtually(work())


def test_error_of_a_rollout_is_raised_at_the_next_batch_and_loses_no_prompt() -> None:
    async def work() -> None:
        llm, num_faults = FakeLLM(), 0

        async def faulty(scoped: Any, prompt: Any) -> list[Any]:
            nonlocal num_faults
            if scoped.columns["level"] == 1 and num_faults < 1:
                num_faults += 1
                raise OSError("the tool is away")
            return [await scoped.generate(prompt)]

        async with producer_of(llm, rollout_fn=faulty, num_epochs=1) as producer:
            with pytest.raises(OSError, match="the tool is away"):
                await anext(producer)
            batches = await train(llm, producer)
            assert levels(batches[0]) == [0, 1]
            assert producer.ledger.consumed == {"trained": 12}
            assert producer.ledger.given_back == {"error": 1}
        assert llm.num_running == 0

    run_virtually(work())


def test_aclose_aborts_all_requests_and_gives_prompts_back() -> None:
    async def work() -> None:
        llm = FakeLLM()
        producer = producer_of(llm, max_staleness_versions=2)
        with pytest.raises(asyncio.TimeoutError):  # of the trainer
            async with producer:
                await asyncio.wait_for(anext(producer), 1.5)
        assert llm.num_running == 0
        assert llm.num_cancelled == 3 * 2 * 3
        assert producer.ledger.num_out == 0
        assert producer.ledger.given_back == {"closed": 6}
        assert producer.state_dict()["unfinished"] == [[0, position] for position in range(6)]
        with pytest.raises(ProducerError, match="not running"):
            await anext(producer)
        await producer.aclose()

    run_virtually(work())


def test_cancelled_anext_loses_nothing() -> None:
    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm) as producer:
            for _ in range(3):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(anext(producer), 0.5)
            assert levels(await anext(producer)) == [0, 1]
        assert llm.num_started == 4 * 3

    run_virtually(work())


@pytest.mark.parametrize("is_trained", [True, False])
def test_resumed_producer_trains_each_prompt_once(is_trained: bool) -> None:
    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, num_epochs=1, max_staleness_versions=2) as producer:
            done = [level for batch in await train(llm, producer, 3) for level in levels(batch)]
            state = json.loads(json.dumps(producer.state_dict(last_batch_trained=is_trained)))
        llm = FakeLLM(weights_version=3)
        resumed = producer_of(llm, num_epochs=1)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        async with resumed:
            batches = await train(llm, resumed)
        rest = [level for batch in batches for level in levels(batch)]
        kept = done if is_trained else done[:-2]
        assert sorted(kept + rest) == list(range(12))
        assert rest == sorted(rest), "in the original order"
        assert batches[0].version == 3

    run_virtually(work())


def test_prompt_ledger_may_serve_one_producer_after_another() -> None:
    async def work() -> None:
        ledger = PromptLedger(PROMPTS, shuffle=False, num_epochs=1)
        for _ in range(3):
            llm = FakeLLM()
            async with producer_of(llm, prompts=ledger) as producer:
                await train(llm, producer, 2)
        assert ledger.consumed == {"trained": 12}
        assert ledger.is_exhausted

    run_virtually(work())


class BlockingLLM:
    """An LLM whose `generate` is not a coroutine."""

    generate = LLM.generate
    weights_version = 0


@pytest.mark.parametrize(
    ("llm", "changes", "named"),
    [
        (BlockingLLM(), {}, r"AsyncLLM, or wrap an LLM: ThreadedLLM\(llm\)"),
        (FakeLLM(), {"group_size": 0}, "group_size=0 must be .*at least 1"),
        (FakeLLM(), {"max_staleness_versions": -1}, "max_staleness_versions=-1"),
        (FakeLLM(), {"max_refills": -1}, "max_refills=-1 must be .*at least 0"),
        (FakeLLM(), {"version_timeout_s": math.nan}, "version_timeout_s=nan must be a number"),
        (FakeLLM(), {"sampling_params": SamplingParams()}, "return_log_probs=True"),
        (FakeLLM(), {"temperature": 0.5}, "temperature=0.5"),
        (FakeLLM(), {"sampling_params": SamplingParams(seed=3)}, r"seed=3: .*give it as seed="),
        (FakeLLM(), {"prompts": []}, "no prompts"),
    ],
)
def test_producer_refuses_options_that_cannot_work(
    llm: Any, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        producer_of(llm, **changes)


def test_logprobs_mode_processed_gives_batches_the_probabilities_of_truncated_sampling() -> None:
    params = SamplingParams(return_log_probs=True, logprobs_mode="processed", top_p=0.9)

    async def work() -> None:
        async with producer_of(FakeLLM(), sampling_params=params) as producer:
            batch = await anext(producer)
            assert (batch.rollouts.behaviour_logprobs_BT[batch.rollouts.mask_BT] < 0.0).all()

    run_virtually(work())


def test_producer_raises_for_a_missing_column_of_the_reward_function() -> None:
    async def wants(completion_ids: Any, difficulty: Any) -> list[float]:
        return []

    async def work() -> None:
        llm = FakeLLM()
        async with producer_of(llm, wants) as producer:
            with pytest.raises(ConfigError, match="no column for the parameters difficulty"):
                await anext(producer)

    run_virtually(work())
