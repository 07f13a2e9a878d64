"""The same seeded requests give the same tokens however they are scheduled."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from rollout import LLM, DynamicInferenceRequest, InferenceConfig, SamplingParams
from rollout.step.seeds import mix_seed
from tests.run_seed import run_seed
from tests.tiny_models import (
    BLOCK_SIZE,
    IS_LONG,
    Finished,
    Margins,
    drain,
    generate_all,
    pool_gb,
    prompt_of,
    tiny_engine,
    tiny_model,
)

NUM_REQUESTS = 200 if IS_LONG else 24
Job = tuple[list[int], SamplingParams]
SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05, "top_p": 0.95},
    {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.7},
    {"temperature": 1.0, "frequency_penalty": 1.8, "logit_bias": {3: 4.0, 7: -5.0}, "top_p": 0.9},
)


@cache
def model() -> Any:
    return tiny_model("qwen3", seed=3)


@cache
def jobs() -> tuple[Job, ...]:
    chooser = random.Random(0)
    return tuple(
        (
            prompt_of(chooser.choice((1, 5, 8, 16, 17, 40, 90)), seed=i),
            SamplingParams(
                num_tokens_to_generate=chooser.randint(10, 50),
                seed=1000 + i,
                **SAMPLERS[i % len(SAMPLERS)],
            ),
        )
        for i in range(NUM_REQUESTS)
    )


@cache
def alone() -> tuple[DynamicInferenceRequest, ...]:
    """Return the reference: the results of each request alone."""
    engine = tiny_engine(model())
    return tuple(generate_all(engine, [job])[0] for job in jobs())


def assert_same(results: Iterable[DynamicInferenceRequest]) -> None:
    margins = Margins()
    for result, reference in zip(results, alone(), strict=True):
        assert result.finish_reason == reference.finish_reason == "length"
        margins.compare(model(), result, reference.generated_tokens)
    margins.check()
    assert margins.num_tokens > 25 * NUM_REQUESTS


def in_order(finished: Finished) -> list[DynamicInferenceRequest]:
    return [finished[i] for i in range(NUM_REQUESTS)]


def test_one_at_a_time_gives_what_the_trainers_model_and_the_seed_say() -> None:
    margins = Margins()
    for request in alone():
        margins.compare_with_oracle(model(), request)
    margins.check()


def test_all_at_once() -> None:
    assert_same(generate_all(tiny_engine(model()), jobs()))


@pytest.mark.parametrize("max_tokens", [5, 32, 100])
def test_chunked_prefill(max_tokens: int) -> None:
    engine = tiny_engine(model(), enable_chunked_prefill=True, max_tokens=max_tokens)
    assert_same(generate_all(engine, jobs()))


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("num_paused_blocks", [None, 0, 6])
def test_a_pool_so_small_that_requests_pause_and_are_evicted(
    num_paused_blocks: int | None, is_chunked: bool
) -> None:
    paused_gb = None if num_paused_blocks is None else pool_gb(model(), num_paused_blocks)
    engine = tiny_engine(
        model(),
        num_blocks=20,
        enable_chunked_prefill=is_chunked,
        max_tokens=24 if is_chunked else None,
        paused_buffer_size_gb=paused_gb,
        schedule_conservativeness=0.0,
    )
    assert_same(generate_all(engine, jobs()))
    stats = engine.stats()
    assert stats.num_evictions > 0
    # Requests pause where room for paused ones is asked for; else the newest goes at once.
    assert (stats.num_pauses > 0) == bool(num_paused_blocks)
    assert stats.num_blocks_used == 0


def test_few_rows() -> None:
    engine = tiny_engine(model(), max_requests=3)
    assert_same(generate_all(engine, jobs()))


def test_other_orders_of_arrival_while_others_run() -> None:
    order = list(range(NUM_REQUESTS))
    random.Random(run_seed()).shuffle(order)
    engine, finished = tiny_engine(model(), num_blocks=60), {}
    for i in order:
        prompt, params = jobs()[i]
        engine.add_request(prompt, params, request_id=i)
        finished |= {record.request_id: record.merge() for record in engine.step()}
    assert_same(in_order(finished | drain(engine)))


def test_priorities() -> None:
    engine = tiny_engine(model(), num_blocks=20)
    for i, (prompt, params) in enumerate(jobs()):
        engine.add_request(prompt, params, request_id=i, priority=i % 5)
    assert_same(in_order(drain(engine)))


def test_other_blocks_and_other_neighbours() -> None:
    engine = tiny_engine(model(), block_size_tokens=64, num_blocks=100)
    others = [(prompt_of(30, seed=99), SamplingParams(num_tokens_to_generate=60))] * 8
    results = generate_all(engine, [*others[:4], *jobs(), *others[4:]])
    assert_same(results[4:-4])


# ---- groups


GROUP_PARAMS = [
    SamplingParams(num_tokens_to_generate=20 + i, seed=i, **SAMPLERS[i % len(SAMPLERS)])
    for i in range(8)
]
GROUP_POOLS: list[dict[str, Any]] = [
    {},
    {"num_blocks": 14},
    {"num_blocks": 14, "enable_chunked_prefill": True, "max_tokens": 9},
    {"max_requests": 3},
]


@pytest.mark.drawn(5)
@pytest.mark.parametrize("config", GROUP_POOLS, ids=str)
@pytest.mark.parametrize("length", [1, 8, 21, 40])
def test_samples_of_a_group_are_those_of_single_requests(
    length: int, config: dict[str, Any]
) -> None:
    prompt, margins = prompt_of(length), Margins()
    reference = tiny_engine(model())
    expected = [generate_all(reference, [(prompt, p)])[0] for p in GROUP_PARAMS]
    engine = tiny_engine(model(), **config)
    ids = engine.add_group(prompt, GROUP_PARAMS)
    finished = drain(engine)
    for i, request in zip(ids, expected, strict=True):
        margins.compare(model(), finished[i], request.generated_tokens)
    margins.check()
    assert engine.stats().num_forked_requests > 0
    assert engine.stats().num_blocks_used == 0


def test_llm_samples_are_single_requests_with_mixed_seeds() -> None:
    config = InferenceConfig(block_size_tokens=BLOCK_SIZE, buffer_size_gb=pool_gb(model(), 300))
    params = SamplingParams(num_tokens_to_generate=16, seed=11)
    prompts = [prompt_of(5), prompt_of(20)]
    with LLM(model(), inference_config=config) as llm:
        grouped, margins = llm.generate(prompts, params, n=4), Margins()
    seeds = [mix_seed(11, prompt, sample) for prompt in (0, 1) for sample in range(4)]
    assert [request.seed for request in grouped] == seeds
    for i, request in enumerate(grouped):
        single = SamplingParams(num_tokens_to_generate=16, seed=seeds[i])
        (alone,) = generate_all(tiny_engine(model()), [(prompts[i // 4], single)])
        margins.compare(model(), request, alone.generated_tokens)
    margins.check()


def test_unseeded_requests_repeat_with_the_engines_seed_and_differ_with_another() -> None:
    params = SamplingParams(num_tokens_to_generate=30)
    batch = [(prompt_of(6), params)] * 3

    def tokens(seed: int) -> list[list[int]]:
        requests = generate_all(tiny_engine(model(), seed=seed), batch)
        return [request.generated_tokens for request in requests]

    first = tokens(1)
    assert tokens(1) == first
    assert tokens(2) != first
    assert first[0] != first[1] != first[2]
