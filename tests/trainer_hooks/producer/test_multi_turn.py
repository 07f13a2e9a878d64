"""rollout_fn over a real engine: every sampled token of all turns is trained on as sampled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from benchmarks.virtual_time import run_virtually
from examples.multi_turn import SumTokenizer, tiny_policy
from rollout import LLM, InferenceConfig, SamplingParams
from rollout.apis.threaded_llm import ThreadedLLM
from rollout.errors import ConfigError
from rollout.step.seeds import mix_seed
from tests.trainer_hooks.producer.fake_llm import FakeLLM
from trainer_hooks.producer import AsyncRolloutProducer, RolloutLLM, TrainingBatch
from trainer_hooks.rollouts import Rollout

TOKENIZER = SumTokenizer()
CONFIG = InferenceConfig(block_size_tokens=8, max_sequence_length=256, buffer_size_gb=0.02)
PARAMS = SamplingParams(
    num_tokens_to_generate=8, termination_id=-1, return_log_probs=True, logprobs_mode="temperature"
)
PROMPTS = [{"prompt": TOKENIZER.encode(f"{n}+11="), "tool": f"<1{n}>"} for n in range(6)]


def lengths(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    return [float(sum(ids) % 3) for ids in completion_ids]


def produce(rollout_fn: Callable[..., Any], num_batches: int = 2) -> list[TrainingBatch]:
    """Return batches of a real engine whose version rises while rollouts are in progress."""

    async def work() -> list[TrainingBatch]:
        with LLM(tiny_policy(TOKENIZER), TOKENIZER, CONFIG) as llm:
            async with (
                ThreadedLLM(llm) as threaded,
                AsyncRolloutProducer(
                    threaded, PROMPTS, lengths, 3, 2, 2, rollout_fn, sampling_params=PARAMS
                ) as producer,
            ):
                batches = []
                for _ in range(num_batches):
                    batches.append(await asyncio.wait_for(anext(producer), 60))
                    llm.update_weights(tiny_policy(TOKENIZER).state_dict(), in_flight=True)
                return batches

    return asyncio.run(work())


async def in_tokens(llm: RolloutLLM, prompt: list[int]) -> list[Any]:
    context, turns = list(prompt), []
    for _ in range(3):
        turns.append(await llm.generate(context, num_tokens_to_generate=5 + len(turns)))
        context += turns[-1].generated_tokens + TOKENIZER.encode(llm.columns["tool"])
    return turns


async def in_text(llm: RolloutLLM, prompt: list[int]) -> list[Any]:
    text, turns = TOKENIZER.decode(prompt), []
    for _ in range(3):
        turns.append(await llm.generate(TOKENIZER.encode(text)))
        text += TOKENIZER.decode(turns[-1].generated_tokens) + llm.columns["tool"]
    return turns


def test_rollout_fn_masks_and_tokens_follow_its_turns() -> None:
    num_split = 0
    for batch in produce(in_tokens):
        rows, index = batch.rollouts, 0
        for group in batch.groups:
            tool = TOKENIZER.encode(group.item.columns["tool"])
            for rollout in group.rollouts:
                generated = [turn.generated_tokens for turn in rollout.requests]
                assert [len(tokens) for tokens in generated] == [5, 6, 7]
                expected = list(group.item.prompt)
                mask = [False] * len(expected)
                for turn, tokens in enumerate(generated):
                    expected += tokens + (tool if turn < 2 else [])
                    mask += [True] * len(tokens) + ([False] * len(tool) if turn < 2 else [])
                end = len(expected)
                assert rows.tokens_BT[index, :end].tolist() == expected
                assert rows.mask_BT[index, :end].tolist() == mask
                assert not rows.mask_BT[index, end:].any()
                said = [float(x) for turn in rollout.requests for x in turn.generated_log_probs]
                kept = rows.behaviour_logprobs_BT[index, :end][rows.mask_BT[index, :end]]
                assert kept.tolist() == pytest.approx(said)
                num_split += TOKENIZER.encode(TOKENIZER.decode(expected)) != expected
                index += 1
    assert num_split > 0, "encoding again would have changed some"


def test_rollout_llm_gives_each_turn_of_each_sample_its_own_seed() -> None:
    (batch,) = produce(in_tokens, num_batches=1)
    seeds = [r.seed for group in batch.groups for r in group.requests]
    assert len(set(seeds)) == len(seeds) == 2 * 3 * 3
    group = batch.groups[0]
    group_seed = mix_seed(0, 0, group.ticket.position, 0)
    own = [mix_seed(mix_seed(group_seed, 1, turn), 0, 0) for turn in range(3)]
    assert [turn.seed for turn in group.rollouts[1].requests] == own


def test_rollout_fn_that_re_encodes_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"turn [12] was (cut or )?re-tokenised.*position \d+"):
        produce(in_text)


def test_staleness_bound_holds_over_all_turns() -> None:
    rng = random.Random(3)
    llm = FakeLLM(lambda: rng.random() * 4.0)

    async def turns(scoped: RolloutLLM, prompt: list[int]) -> Rollout:
        first = await scoped.generate(prompt)
        await asyncio.sleep(rng.random() * 9.0)  # the tool
        context = [*prompt, *first.generated_tokens, 7]
        return Rollout([first, await scoped.generate(context)])

    async def reward(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return lengths(completion_ids)

    async def work(bound: int) -> int:
        oldest = 0
        async with AsyncRolloutProducer(llm, PROMPTS, reward, 2, 2, bound, turns) as producer:
            for _ in range(20):
                batch = await anext(producer)
                ages = batch.rollouts.policy_lag_BT[batch.rollouts.mask_BT]
                assert len(ages) == 2 * 2 * 2 * 3
                oldest = max(oldest, int(ages.max()))
                assert oldest <= bound
                await llm.push(lag_s=rng.random())
        return oldest

    assert [run_virtually(work(bound)) for bound in (0, 1, 2)] == [0, 1, 2]
