"""n samples of one prompt compute it once, in one group or one after the other."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from rollout import DynamicInferenceEngine, SamplingParams
from tests.tiny_models import (
    BLOCK_SIZE,
    Margins,
    drain,
    generate_all,
    prompt_of,
    tiny_engine,
    tiny_model,
)

NUM_SAMPLES = 8
NUM_TOKENS = 6


@cache
def model() -> Any:
    return tiny_model(seed=4)


def samples(group: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            num_tokens_to_generate=NUM_TOKENS,
            seed=100 * group + i,
            frequency_penalty=0.7 * (i % 2),
        )
        for i in range(NUM_SAMPLES)
    ]


def prompts(length: int) -> list[list[int]]:
    return [prompt_of(length, seed=i) for i in range(3)]


def assert_same_as_alone(engine: DynamicInferenceEngine, length: int, finished: dict) -> None:
    """Check that tokens and log-probs equal those of requests that share nothing."""
    alone = tiny_engine(model())
    jobs = [(p, s) for i, p in enumerate(prompts(length)) for s in samples(i)]
    margins = Margins()
    for reference, request_id in zip(generate_all(alone, jobs), sorted(finished), strict=True):
        margins.compare(model(), finished[request_id], reference.generated_tokens)
    margins.check()
    assert alone.stats().num_prefill_tokens == NUM_SAMPLES * 3 * length
    assert engine.stats().num_sampled_tokens == alone.stats().num_sampled_tokens


@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.parametrize("length", [40, 45])
def test_a_group_computes_its_prompt_once(length: int, has_cache: bool) -> None:
    engine = tiny_engine(model(), enable_prefix_caching=has_cache)
    for i, prompt in enumerate(prompts(length)):
        engine.add_group(prompt, samples(i))
    assert_same_as_alone(engine, length, drain(engine))
    stats = engine.stats()
    assert stats.num_prefill_tokens == 3 * length  # a share of 1 in NUM_SAMPLES
    assert stats.num_forked_requests == 3 * (NUM_SAMPLES - 1)
    assert stats.num_prefix_hit_tokens == 0


@pytest.mark.parametrize("length", [40, 45])
def test_samples_that_come_later_compute_only_the_block_of_the_last_token(length: int) -> None:
    engine = tiny_engine(model(), enable_prefix_caching=True, prefix_caching_eviction_policy="lru")
    finished = {}
    for i, prompt in enumerate(prompts(length)):
        for params in samples(i):
            engine.add_request(prompt, params)
            finished |= drain(engine)
    assert_same_as_alone(engine, length, finished)
    stats = engine.stats()
    num_hit = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert stats.num_prefix_hit_tokens == 3 * (NUM_SAMPLES - 1) * num_hit
    assert stats.num_prefill_tokens == 3 * (NUM_SAMPLES * length - (NUM_SAMPLES - 1) * num_hit)


def test_a_group_that_finds_too_few_rows_takes_the_rest_from_the_index() -> None:
    engine = tiny_engine(
        model(),
        enable_prefix_caching=True,
        prefix_caching_eviction_policy="lru",
        max_requests=3,
    )
    for i, prompt in enumerate(prompts(45)):
        engine.add_group(prompt, samples(i))
    assert_same_as_alone(engine, 45, drain(engine))
    stats = engine.stats()
    num_leaders = 3 * NUM_SAMPLES - stats.num_forked_requests
    assert num_leaders > 3
    assert stats.num_prefix_hit_tokens == (num_leaders - 3) * 40
    assert stats.num_prefill_tokens == 3 * 45 + (num_leaders - 3) * 5
