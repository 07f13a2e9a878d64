"""RequestTotals of an engine: tokens, ends and latencies, and requests without room."""

from __future__ import annotations

import bisect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import SamplingParams
from rollout.control.reports import EngineStats
from rollout.engine.counters import FINISH_REASONS, LATENCY_BOUNDS_S, LatencyCounts
from tests.tiny_models import prompt_of, tiny_engine, tiny_model


@given(st.lists(st.floats(0.0, 1e5), max_size=30))
def test_latencies_are_counted_below_their_bound(seconds: list[float]) -> None:
    counts = LatencyCounts()
    for each in seconds:
        counts.add(each)
    for bound, number in zip(LATENCY_BOUNDS_S, counts.counts, strict=False):
        below = LATENCY_BOUNDS_S[bisect.bisect_left(LATENCY_BOUNDS_S, bound) - 1]
        below = -1.0 if bound == LATENCY_BOUNDS_S[0] else below
        assert number == sum(below < each <= bound for each in seconds)
    assert sum(counts.counts) == len(seconds)
    assert counts.seconds == pytest.approx(sum(seconds))


def run(engine: Any, num_steps: int = 10**6) -> list[Any]:
    ended = []
    while engine.has_unfinished_requests() and num_steps:
        ended += engine.step()
        num_steps -= 1
    return ended


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=num_tokens)


def reasons(stats: EngineStats) -> dict[str, int]:
    return dict(zip(FINISH_REASONS, stats.finish_reasons, strict=True))


@pytest.mark.parametrize("num_blocks", [8, 512])
def test_request_totals_do_not_depend_on_evictions(num_blocks: int) -> None:
    crowd: dict[str, Any] = {"schedule_conservativeness": 0.0, "paused_buffer_size_gb": 0.0}
    engine = tiny_engine(tiny_model(), num_blocks=num_blocks, **crowd)
    for i in range(4):
        engine.add_request(prompt_of(12, seed=i), params(24 + i))
    engine.add_group(prompt_of(5), [params(3)] * 3)
    records = run(engine)
    stats = engine.stats()
    assert (stats.num_evictions > 0) is (num_blocks == 8)
    assert len(records) == 7
    requests = [record.merge() for record in records]
    num_generated = sum(len(request.generated_tokens) for request in requests)
    assert stats.num_generated_tokens == num_generated
    assert stats.num_begun_prompt_tokens == 4 * 12 + 3 * 5, "each once"
    assert reasons(stats) == {"stop": 0, "length": 7, "abort": 0, "error": 0}
    assert sum(stats.first_token_latency) == sum(stats.request_latency) == 7
    assert sum(stats.token_latency) == num_generated - 7
    assert stats.first_token_seconds == pytest.approx(sum(r.ttft for r in requests))
    times = sum(sum(request.tpot) for request in requests)
    assert stats.first_token_seconds + stats.token_seconds == pytest.approx(times)
    assert stats.request_seconds == pytest.approx(sum(record.latency for record in records))


def test_a_request_from_another_engine_counts_no_first_token() -> None:
    first, second = (tiny_engine(tiny_model()) for _ in range(2))
    request_id = first.add_request(prompt_of(9), params(6))
    run(first, num_steps=3)
    record = first.abort_request(request_id)
    assert reasons(first.stats())["abort"] == 1
    assert sum(first.stats().request_latency) == 0, "it was aborted"
    unfinished = type(record).from_request(record[0])
    unfinished.current.status = unfinished.current.finish_reason = None
    unfinished.current.completed_at_version = None
    num_before = unfinished.current.num_generated_tokens
    second.add_record(unfinished)
    run(second)
    stats = second.stats()
    assert stats.num_generated_tokens == 6 - num_before
    assert (stats.num_begun_prompt_tokens, sum(stats.first_token_latency)) == (0, 0)
    assert sum(stats.token_latency) == 6 - num_before - 1, "the gap between engines is not known"


def test_num_without_room_counts_requests_beyond_the_rows() -> None:
    engine = tiny_engine(tiny_model(), max_requests=2)
    for i in range(5):
        engine.add_request(prompt_of(4, seed=i), params(3))
    assert (engine.stats().num_waiting, engine.stats().num_without_room) == (5, 0)
    engine.step()
    assert (engine.stats().num_waiting, engine.stats().num_without_room) == (3, 3)
    engine.add_request(prompt_of(4), params(3))
    assert engine.stats().num_without_room == 3, "the last one has come since"
    run(engine)
    assert engine.stats().num_without_room == 0


def test_num_without_room_excludes_samples_that_wait_for_their_prompt() -> None:
    engine = tiny_engine(tiny_model(), max_tokens=8, enable_chunked_prefill=True)
    engine.add_group(prompt_of(20), [params(2)] * 4)
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_without_room) == (1, 3, 0)
    run(engine)
