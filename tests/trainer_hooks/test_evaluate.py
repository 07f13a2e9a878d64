"""evaluate: its metrics, and that it ends beside a producer and updates."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.virtual_time import run_virtually
from rollout import AsyncLLM, SamplingParams
from rollout.errors import ConfigError
from tests.apis.fleets import weights, with_fleet
from tests.tiny_models import IS_LONG, prompt_of
from tests.trainer_hooks.producer.fake_llm import FakeLLM
from tests.trainer_hooks.producer.test_bound import check_bound
from trainer_hooks.evaluation import evaluate
from trainer_hooks.producer import AsyncRolloutProducer, RolloutLLM
from trainer_hooks.rewards import RewardFunctionError
from trainer_hooks.rollouts import Rollout

PROMPTS = [{"prompt": [i, i], "level": i} for i in range(4)]


async def by_level(completion_ids: Any, level: list[int]) -> list[float | None]:
    return [None if each == 3 else float(each + sample) for sample, each in enumerate(level)]


async def no_reward(completion_ids: Any) -> list[None]:
    return [None] * len(completion_ids)


class CodePoints:
    """A tokenizer with one token per character."""

    bos_id, eos_id, vocab_size = None, None, 256

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class LoggingLLM(FakeLLM):
    """An LLM that records its prompts."""

    def __init__(self, tokenizer: Any | None) -> None:
        super().__init__()
        self.tokenizer, self.prompts = tokenizer, []

    async def generate(
        self, prompts: Any, sampling_params: SamplingParams | None = None, n: int = 1
    ) -> Any:
        self.prompts.append(prompts)
        return await super().generate([1, 2], sampling_params, n)


def test_evaluate_counts_samples_whose_reward_function_raises_as_failed() -> None:
    async def hates_three(completion_ids: Any, level: list[int]) -> list[float]:
        return [1.0 / (3 - each) for each in level]

    metrics = run_virtually(evaluate(FakeLLM(), PROMPTS, hates_three, n=2))
    assert metrics["eval/failed_fraction"] == 0.25


def test_evaluate_raises_if_the_reward_function_never_succeeds() -> None:
    async def misspelled(completion_ids: Any) -> list[float]:
        return [float(lenght(ids)) for ids in completion_ids]  # type: ignore[name-defined] # noqa: F821

    with pytest.raises(RewardFunctionError, match="lenght"):
        run_virtually(evaluate(FakeLLM(), PROMPTS, misspelled, n=2))


def test_failed_samples_count_in_the_failed_fraction_alone() -> None:
    metrics = run_virtually(evaluate(FakeLLM(), PROMPTS, by_level, n=2))
    # Rewards: 0 1, 1 2, 2 3, none.
    assert metrics["eval/reward"] == pytest.approx(1.5)
    assert metrics["eval/reward_best_of_n"] == pytest.approx(2.0)
    assert metrics["eval/reward_std"] == pytest.approx(math.sqrt(5.5 / 6))
    assert metrics["eval/failed_fraction"] == 0.25
    assert (metrics["eval/num_prompts"], metrics["eval/num_samples"]) == (4, 8)
    assert metrics["eval/mean_length"] == 3.0
    assert (metrics["eval/version_min"], metrics["eval/version_max"]) == (0, 0)
    assert metrics["eval/seconds"] == 3.0


def test_evaluate_reports_the_versions_of_an_update_in_progress() -> None:
    async def work() -> dict[str, float]:
        llm = FakeLLM()
        running = asyncio.ensure_future(evaluate(llm, PROMPTS, by_level, max_concurrent=1))
        await asyncio.sleep(4.5)
        await llm.push()
        return await running

    metrics = run_virtually(work())
    assert (metrics["eval/version_min"], metrics["eval/version_max"]) == (0, 1)
    assert metrics["eval/seconds"] == 12.0, "one after the other"


def test_evaluate_timeout_aborts_all_requests() -> None:
    async def work() -> None:
        llm = FakeLLM()
        with pytest.raises(TimeoutError, match=r"timeout_s=2\.0"):
            await evaluate(llm, PROMPTS, by_level, timeout_s=2.0)
        assert llm.num_running == 0

    run_virtually(work())


def test_evaluate_encodes_text_only_for_an_llm_without_a_tokenizer() -> None:
    tokenizer = CodePoints()

    def given_to(llm: LoggingLLM) -> list[Any]:
        run_virtually(evaluate(llm, ["1+2="], no_reward, tokenizer=tokenizer))
        return llm.prompts

    assert given_to(LoggingLLM(None)) == [tokenizer.encode("1+2=")]
    assert given_to(LoggingLLM(tokenizer)) == ["1+2="]


def test_evaluate_of_failed_samples_alone_is_nan() -> None:
    metrics = run_virtually(evaluate(FakeLLM(), PROMPTS, no_reward))
    assert math.isnan(metrics["eval/reward"])
    assert metrics["eval/failed_fraction"] == 1.0


def test_evaluate_ends_beside_a_producer_and_updates() -> None:
    params = SamplingParams(
        num_tokens_to_generate=16, return_log_probs=True, logprobs_mode="temperature"
    )
    prompts = [prompt_of(4 + i, seed=i) for i in range(8)]

    def parity(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [float(sum(ids) % 2) for ids in completion_ids]

    async def train(llm: AsyncLLM, num_steps: int) -> None:
        async with AsyncRolloutProducer(
            llm, prompts, parity, 2, 2, 1, sampling_params=params
        ) as producer:
            for step in range(num_steps):
                check_bound(await anext(producer), 1)
                await llm.pause()
                await llm.suspend(("persist", "offload", "recompute")[step % 3])
                await asyncio.sleep(0.02)
                await llm.update_weights(weights(1 + step % 2).state_dict())
                await llm.resume()
                await llm.unpause()

    async def work(llm: AsyncLLM) -> None:
        num_steps = 12 if IS_LONG else 4
        training = asyncio.ensure_future(train(llm, num_steps))
        num_evaluations = 0
        while not training.done() or num_evaluations == 0:
            greedy = replace(params, temperature=0.0, num_tokens_to_generate=24)
            metrics = await asyncio.wait_for(
                evaluate(llm, prompts, parity, greedy, n=1 + num_evaluations % 2), 60
            )
            assert metrics["eval/failed_fraction"] == 0.0
            assert 0 <= metrics["eval/version_min"] <= metrics["eval/version_max"] <= num_steps
            num_evaluations += 1
        await training
        print(f"{num_evaluations} evaluations beside {num_steps} updates")

    with_fleet(2 if IS_LONG else 1, work)


def test_evaluate_pass_at_k_and_majority_are_per_prompt() -> None:
    async def first_of_four(completion_ids: Any, level: list[int]) -> list[float | None]:
        # Successes of 4 samples: 1, 2, 0, and 0 where all fail.
        wins = {0: 1, 1: 2, 2: 0}
        return [None if each == 3 else float(i < wins[each]) for i, each in enumerate(level)]

    answers = iter(["a", "b", "b", None] * 4)
    metrics = run_virtually(
        evaluate(
            FakeLLM(),
            [{**row, "data_source": "odd" if row["level"] % 2 else "even"} for row in PROMPTS],
            first_of_four,
            n=4,
            pass_at=(1, 2, 4),
            answer_fn=lambda completion: next(answers),
        )
    )
    # By hand: 1 - C(3, 2) / C(4, 2) = 1/2 for one success, 1 - 1/6 for two.
    assert metrics["eval/pass@1"] == pytest.approx((1 / 4 + 2 / 4) / 4)
    assert metrics["eval/pass@2"] == pytest.approx((1 / 2 + 5 / 6) / 4)
    assert metrics["eval/pass@4"] == pytest.approx(2 / 4)
    # "b" wins: rewards 0, 0 at level 0; 1, 0 at level 1; 0, 0 at level 2; none at level 3.
    assert metrics["eval/maj@4"] == pytest.approx(0.5 / 4)
    assert metrics["eval/even/pass@4"] == pytest.approx(1 / 2)
    assert metrics["eval/odd/maj@4"] == pytest.approx(0.5 / 2)
    assert metrics["eval/odd/num_prompts"] == 2


def test_evaluate_refuses_pass_at_above_n() -> None:
    with pytest.raises(ConfigError, match=r"pass_at=\[8\] must be from 1 to n=4"):
        run_virtually(evaluate(FakeLLM(), PROMPTS, by_level, n=4, pass_at=(8,)))


def test_evaluate_gives_turns_of_different_prompts_different_seeds() -> None:
    async def two_turns(llm: RolloutLLM, prompt: Any) -> Rollout:
        first = await llm.generate(prompt)
        second = await llm.generate([*prompt, *first.generated_tokens])
        return Rollout([first, second], reward=float(len(prompt)))

    llm = FakeLLM()
    for num_evaluations in (1, 2):
        metrics = run_virtually(evaluate(llm, PROMPTS, None, n=2, rollout_fn=two_turns))
        num_requests = num_evaluations * len(PROMPTS) * 2 * 2
        assert len(set(llm.seeds)) == len(llm.seeds) == num_requests
    assert metrics["eval/reward"] == sum(len(row["prompt"]) for row in PROMPTS) / len(PROMPTS)


@pytest.mark.parametrize("num_right", range(7))
def test_pass_at_k_equals_the_share_over_all_choices_of_k_samples(
    num_right: int,
) -> None:
    """The unbiased estimator is also compared with the product in its source's code.

    Chen et al. 2021, arXiv 2107.03374, eq. 1 and fig. 3.
    """
    num_samples, ks = 6, (1, 2, 3, 5, 6)

    async def first_ones_right(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [float(i < num_right) for i in range(len(completion_ids))]

    found = run_virtually(
        evaluate(FakeLLM(), PROMPTS[:1], first_ones_right, n=num_samples, pass_at=ks)
    )
    for k in ks:
        choices = list(itertools.combinations(range(num_samples), k))
        share = sum(min(chosen) < num_right for chosen in choices) / len(choices)
        num_wrong = num_samples - num_right
        product = math.prod(1 - k / i for i in range(num_wrong + 1, num_samples + 1))
        by_source = 1.0 - product if num_wrong >= k else 1.0
        assert found[f"eval/pass@{k}"] == pytest.approx(share, abs=1e-12)
        assert found[f"eval/pass@{k}"] == pytest.approx(by_source, abs=1e-12)
