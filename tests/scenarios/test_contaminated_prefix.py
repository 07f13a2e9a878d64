"""A request decodes across an update: later requests with the same text never share its old KV."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from rollout import (
    DynamicInferenceEngine,
    DynamicInferenceRequest,
    SamplingParams,
    compute_block_hashes_batched,
)
from tests.tiny_models import (
    BLOCK_SIZE,
    drain,
    expected_logprobs,
    generated_logits,
    prompt_of,
    suspend_and_resume,
    tiny_engine,
    tiny_model,
    tokens_of,
)

PROMPT = prompt_of(20)
NUM_OLD, NUM_NEW = 20, 24  # tokens of the first request before and after the update
TOLERANCE = 1e-4
HOW = ("in_flight", "paused", "persist", "offload")


@cache
def old_model() -> Any:
    return tiny_model(seed=1)


@cache
def new_model() -> Any:
    return tiny_model(seed=2)


def params(num_tokens: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=num_tokens, seed=seed, return_log_probs=True)


def update(engine: DynamicInferenceEngine, how: str) -> None:
    tensors = dict(new_model().named_parameters())
    if how == "in_flight":
        engine.update_weights(tensors, in_flight=True)
        return
    engine.pause()
    if how != "paused":
        engine.suspend(how)
    engine.update_weights(tensors)
    engine.resume()
    engine.unpause()


def decode_across(how: str, **config: Any) -> tuple[DynamicInferenceEngine, list[int]]:
    """Return an engine in which a request decodes across an update, and that request's text."""
    engine = tiny_engine(tiny_model(seed=1), enable_prefix_caching=True, **config)
    request_id = engine.add_request(PROMPT, params(NUM_OLD + NUM_NEW + 8))
    for _ in range(NUM_OLD):
        engine.step()
    update(engine, how)
    for _ in range(NUM_NEW):
        engine.step()
    return engine, tokens_of(engine.get_record(request_id).merge())


def sharers(engine: DynamicInferenceEngine, text: list[int]) -> list[DynamicInferenceRequest]:
    """Return requests that share ever more of the text: old blocks, the mixed one, new blocks."""
    lengths = (BLOCK_SIZE + 1, len(PROMPT), len(PROMPT) + NUM_OLD, len(text))
    ids = []
    for length in lengths:
        ids.append(engine.add_request(text[:length], params(6, seed=length)))
        assert not engine.step(), "the next one comes when this one's prompt is computed"
    finished = drain(engine)
    return [finished[i] for i in ids]


def distance(request: DynamicInferenceRequest, model: Any) -> float:
    """Return the largest distance of the log-probs to those of `model` alone."""
    logits = generated_logits(model, request)
    expected = [
        expected_logprobs(logits_V, request.sampling_params)[token]
        for logits_V, token in zip(logits, request.generated_tokens, strict=True)
    ]
    return float(np.abs(request.generated_log_probs.numpy() - expected).max())


def assert_pure(request: DynamicInferenceRequest) -> None:
    assert distance(request, new_model()) < TOLERANCE
    assert request.kv_cache_staleness.tolist() == [0] * request.num_tokens
    assert request.context_kv_version_min == [1] * len(request.generated_tokens)
    assert request.context_kv_version_mean == [1] * len(request.generated_tokens)


@pytest.mark.parametrize("eviction", ["ref_zero", "lru"])
@pytest.mark.parametrize("how", HOW)
def test_a_block_written_over_older_context_is_never_shared(how: str, eviction: str) -> None:
    engine, text = decode_across(how, prefix_caching_eviction_policy=eviction)
    for request in sharers(engine, text):
        assert_pure(request)
    assert engine.stats().num_prefix_hit_tokens > 0, "the new requests share among themselves"


@pytest.mark.parametrize("how", HOW)
def test_old_blocks_are_not_shared_after_their_writer_has_ended(how: str) -> None:
    engine, text = decode_across(how, prefix_caching_eviction_policy="lru")
    drain(engine)
    for request in sharers(engine, text):
        assert_pure(request)


def test_a_first_block_written_across_an_update_is_never_shared() -> None:
    engine = tiny_engine(tiny_model(seed=1), enable_prefix_caching=True)
    writer = engine.add_request(PROMPT[:3], params(40))
    for _ in range(3):
        engine.step()
    update(engine, "in_flight")
    for _ in range(24):
        engine.step()
    text = tokens_of(engine.get_record(writer).merge())
    for length in (BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 1, len(text)):
        request_id = engine.add_request(text[:length], params(1, seed=length))
        (record,) = engine.step()
        assert record.request_id == request_id
        assert_pure(record.merge())


def test_a_prompt_prefilled_across_an_update_is_not_shared() -> None:
    engine = tiny_engine(
        tiny_model(seed=1),
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_tokens=BLOCK_SIZE + 4,
    )
    text = prompt_of(4 * BLOCK_SIZE)
    engine.add_request(text, params(30))
    engine.step()
    update(engine, "in_flight")
    for _ in range(4):
        engine.step()
    engine.add_request(text, params(6))
    assert_pure(drain(engine)[1])


@pytest.mark.parametrize("how", HOW)
def test_prefix_reuse_across_versions_shares_and_reports_old_blocks(how: str) -> None:
    engine, text = decode_across(how, prefix_reuse_across_versions=True)
    mixed = sharers(engine, text)
    num_old = len(PROMPT) + NUM_OLD - 1  # the last old token's KV is written by the new weights
    for request in mixed:
        num_prompt = len(request.prompt_tokens)
        num_hit = (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE
        expected = [0] * min(num_hit, num_old)
        expected += [1] * (request.num_tokens - len(expected))
        assert (1 - request.kv_cache_staleness).tolist() == expected
        assert request.context_kv_version_min == [0] * 6
        mean = sum(expected[:num_prompt]) / num_prompt
        assert request.context_kv_version_mean[0] == pytest.approx(mean)
        assert distance(request, new_model()) > 100 * TOLERANCE
    assert engine.stats().num_prefix_hit_tokens > 100


def test_max_kv_staleness_versions_bounds_reused_blocks() -> None:
    engine = tiny_engine(
        tiny_model(seed=1),
        enable_prefix_caching=True,
        prefix_reuse_across_versions=True,
        prefix_caching_eviction_policy="lru",
        max_kv_staleness_versions=1,
    )
    engine.add_request(PROMPT, params(4))
    drain(engine)
    for num_hits in (16, 16):  # of age 1, then none: the first request's blocks have age 2
        update(engine, "in_flight")
        request_id = engine.add_request(PROMPT, params(4))
        request = drain(engine)[request_id]
        assert engine.stats().num_prefix_hit_tokens == num_hits
    assert request.kv_cache_staleness.tolist() == [0] * request.num_tokens
    engine.add_request(PROMPT, params(4))
    drain(engine)
    assert engine.stats().num_prefix_hit_tokens == 32, "the old blocks made way for the new ones"


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize(("mode", "num_hits"), [("persist", 16), ("offload", 0), ("recompute", 0)])
def test_unused_blocks_are_dropped_by_a_suspend_that_releases_their_memory(
    mode: str, num_hits: int, reuses: bool
) -> None:
    engine = tiny_engine(
        tiny_model(seed=1),
        enable_prefix_caching=True,
        prefix_reuse_across_versions=reuses,
        prefix_caching_eviction_policy="lru",
    )
    engine.add_request(PROMPT, params(4))
    drain(engine)
    suspend_and_resume(engine, mode)
    request_id = engine.add_request(PROMPT, params(4))
    assert distance(drain(engine)[request_id], old_model()) < TOLERANCE
    assert engine.stats().num_prefix_hit_tokens == num_hits


def test_texts_whose_routing_hashes_collide_never_share_kv() -> None:
    first, second = [31, 0, 0, 0], [0, 1, 0, 0]
    tail = prompt_of(6)
    assert compute_block_hashes_batched(first, 4) == compute_block_hashes_batched(second, 4)
    engine = tiny_engine(old_model(), enable_prefix_caching=True, block_size_tokens=4)
    finished = {}
    for text, num_hits in ((first, 0), (first, 8), (second, 8), (second, 16)):
        engine.add_request(text + tail, params(8))
        finished |= {record.request_id: record.merge() for record in engine.step()}
        assert engine.stats().num_prefix_hit_tokens == num_hits
    finished |= drain(engine)
    assert len(finished) == 4
    for request in finished.values():
        assert distance(request, old_model()) < TOLERANCE
