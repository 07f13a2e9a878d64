"""Events, times and stops of a request in an engine, and requests of a failed step."""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any

import pytest
import torch

from rollout import (
    DetokenizeError,
    DynamicInferenceEngine,
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    InferenceConfig,
    SamplingParams,
    Status,
)
from rollout.version_spans import VersionSpans
from tests.tiny_models import (
    drain,
    generate_all,
    pool_gb,
    prompt_of,
    suspend_and_resume,
    tiny_engine,
    tiny_model,
)


@cache
def model() -> Any:
    return tiny_model(seed=6)


def params(num_tokens: int = 8, **changes: Any) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=num_tokens, **({"seed": 4} | changes))


def names(request: DynamicInferenceRequest) -> list[str]:
    return [event.type.name for event in request.events]


def assert_ordered(request: DynamicInferenceRequest) -> None:
    times = [event.timestamp for event in request.events]
    assert times == sorted(times)
    assert names(request)[0] == "ADD_ENGINE"
    assert names(request)[-1] in ("FINISH", "FAIL")
    assert names(request).count("ADD_ENGINE") == 1
    assert request.event_add_engine is request.events[0]


def test_events_of_an_undisturbed_request_are_three_and_have_its_times() -> None:
    engine = tiny_engine(model())
    before = time.time()
    engine.add_request(prompt_of(9), params())
    request = drain(engine)[0]
    seconds = time.time() - before
    assert_ordered(request)
    assert names(request) == ["ADD_ENGINE", "ADD_CONTEXT", "FINISH"]
    assert len(request.tpot) == 8
    assert 0 < request.ttft == request.tpot[0] <= request.latency <= seconds
    assert sum(request.tpot) == pytest.approx(request.latency, abs=1e-3)
    assert before <= request.arrival_time == request.event_add_engine.timestamp


def test_latency_ttft_and_tpot_do_not_depend_on_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = tiny_engine(model())
    engine.add_request(prompt_of(9), params())
    an_hour_ago = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: an_hour_ago)
    request = drain(engine)[0]
    assert 0 < request.ttft == request.tpot[0] <= request.latency < 3600
    assert min(request.tpot) > 0


@pytest.mark.parametrize(("entered_s_ago", "least_s"), [(100.0, 100.0), (-100.0, 0.0)])
def test_latency_of_a_request_of_another_engine_counts_from_its_first_entry(
    entered_s_ago: float, least_s: float
) -> None:
    """The other machine's clock may be ahead."""
    entry = DynamicInferenceEvent(
        type=DynamicInferenceEventType.ADD_ENGINE, timestamp=time.time() - entered_s_ago
    )
    request = DynamicInferenceRequest(
        request_id=0,
        prompt_tokens=torch.arange(4),
        sampling_params=params(),
        seed=4,
        events=[entry],
        generated_tokens=[1],
    )
    engine = tiny_engine(model())
    engine.add_record(DynamicInferenceRequestRecord.from_request(request))
    assert least_s <= drain(engine)[0].latency < least_s + 100


def test_get_record_returns_a_copy_that_later_steps_do_not_change() -> None:
    engine = tiny_engine(model(), kv_cache_management_mode="recompute")
    engine.add_request(prompt_of(9), params(return_log_probs=True, skip_prompt_log_probs=False))
    for _ in range(3):
        engine.step()
    record = engine.get_record(0)
    request = record.merge()
    seen = (request.generated_tokens, names(request), request.status, request.tpot)
    ages = request.kv_cache_staleness.tolist()
    engine.pause()
    engine.suspend()
    engine.set_generation_epoch(engine.weights_version + 1)
    engine.resume()
    engine.unpause()
    drain(engine)
    later = record.merge()
    assert (later.generated_tokens, names(later), later.status, later.tpot) == seen
    assert later.kv_cache_staleness.tolist() == ages
    assert torch.equal(later.prompt_log_probs, request.prompt_log_probs)
    assert len(record.requests) == 1
    assert later.latency is None


def test_add_context_comes_with_the_last_chunk_of_a_prompt() -> None:
    engine = tiny_engine(model(), enable_chunked_prefill=True, max_tokens=4)
    engine.add_request(prompt_of(10), params())
    for expected in (["ADD_ENGINE"], ["ADD_ENGINE"], ["ADD_ENGINE", "ADD_CONTEXT"]):
        engine.step()
        assert names(engine.get_record(0).merge()) == expected


def test_remaining_prompt_length_shrinks_with_each_chunk_and_restarts_after_a_suspend() -> None:
    engine = tiny_engine(model(), enable_chunked_prefill=True, max_tokens=4)
    engine.add_request(prompt_of(10), params())

    def left() -> int:
        engine.step()
        return engine.get_record(0).current.remaining_prompt_length

    assert engine.get_record(0).current.remaining_prompt_length == 10
    assert [left(), left()] == [6, 2]
    engine.pause()
    engine.suspend("recompute")
    assert engine.get_record(0).current.remaining_prompt_length == 10
    engine.resume()
    engine.unpause()
    assert [left(), left(), left(), left()] == [6, 2, 0, 0]


def test_get_record_of_a_running_request_has_lists_of_its_own() -> None:
    engine = tiny_engine(model(), kv_cache_management_mode="recompute", enable_prefix_caching=True)
    wanted = params(return_log_probs=True, top_n_logprobs=2)
    engine.add_request(prompt_of(9), wanted)
    expected = generate_all(tiny_engine(model()), [(prompt_of(9), wanted)])[0]
    for num_tokens in (1, 2, 3):
        engine.step()
        if num_tokens == 3:
            suspend_and_resume(engine)
        record = engine.get_record(0)
        segment = record[0]
        assert segment.generated_tokens == expected.generated_tokens[:num_tokens]
        assert segment.context_kv_version_mean == [0.0] * num_tokens
        assert len(segment.generated_log_probs) == num_tokens
        json.dumps([segment.generated_tokens, segment.generated_log_probs, segment.tpot])
        for values in (segment.generated_tokens, segment.policy_spans, record.requests):
            values.append(*((1, 7) if isinstance(values, VersionSpans) else (7,)))
    (request,) = drain(engine).values()
    assert request.generated_tokens == expected.generated_tokens
    assert request.policy_versions.tolist() == [0] * 8


def test_statuses_follow_the_request() -> None:
    engine = tiny_engine(model(), num_blocks=7, max_requests=3, paused_buffer_size_gb=1.0)
    for i in range(4):
        engine.add_request(prompt_of(9, seed=i), params(30))
    status = {i: engine.get_record(i).current.status for i in range(4)}
    assert set(status.values()) == {Status.WAITING_IN_QUEUE}
    seen = set()
    while engine.has_unfinished_requests():
        ended = {record.request_id for record in engine.step()}
        stats = engine.stats()
        alive = [i for i in range(4) if i not in ended and i in status]
        status = {i: engine.get_record(i).current.status for i in alive}
        counted = [
            sum(value is kind for value in status.values())
            for kind in (
                Status.WAITING_IN_QUEUE,
                Status.ACTIVE_AND_GENERATING_TOKENS,
                Status.ACTIVE_BUT_NOT_GENERATING_TOKENS,
            )
        ]
        assert counted == [stats.num_waiting, stats.num_running, stats.num_paused]
        seen |= set(status.values())
    assert len(seen) == 3


def test_pause_and_evict_events_are_logged_in_order() -> None:
    engine = tiny_engine(
        model(),
        num_blocks=8,
        paused_buffer_size_gb=1.0,
        track_paused_request_events=True,
        track_generated_token_events=True,
    )
    jobs = [(prompt_of(12, seed=i), params(24)) for i in range(4)]
    requests = generate_all(engine, jobs)
    stats = engine.stats()
    assert stats.num_evictions > 0
    assert sum(names(r).count("EVICT") for r in requests) == stats.num_evictions
    assert sum(names(r).count("PAUSE") for r in requests) == stats.num_pauses > 0
    for request in requests:
        assert_ordered(request)
        assert names(request).count("GENERATED_TOKEN") == 24
        # A new context for each eviction, save one before the first prefill.
        assert 1 <= names(request).count("ADD_CONTEXT") <= 1 + names(request).count("EVICT")
        assert len(request.tpot) == 24
        assert request.ttft == request.tpot[0]


def test_suspend_adds_no_second_add_engine_event_and_keeps_ttft() -> None:
    engine = tiny_engine(model(), kv_cache_management_mode="recompute")
    engine.add_request(prompt_of(9), params())
    engine.step()
    ttft = engine.get_record(0).merge().ttft
    suspend_and_resume(engine)
    request = drain(engine)[0]
    assert names(request) == ["ADD_ENGINE", "ADD_CONTEXT", "ADD_CONTEXT", "FINISH"]
    assert request.ttft == ttft


# ---- stopping


def free_run() -> list[int]:
    return generate_all(tiny_engine(model()), [(prompt_of(9), params(40))])[0].generated_tokens


def test_the_termination_id_stops_and_is_part_of_the_tokens() -> None:
    tokens = free_run()
    end = tokens[7]
    first = tokens.index(end)
    jobs = [
        (prompt_of(9), params(40, termination_id=end, return_log_probs=True)),
        (prompt_of(9), params(40, termination_id=end, ignore_eos=True)),
        (prompt_of(9), params(40, termination_id=-1)),
        (prompt_of(9), params(first + 1, termination_id=end)),
    ]
    stopped, *ignoring, both = generate_all(tiny_engine(model()), jobs)
    assert stopped.generated_tokens == tokens[: first + 1]
    assert len(stopped.generated_log_probs) == first + 1
    assert stopped.finish_reason == both.finish_reason == "stop"
    for request in ignoring:
        assert (request.generated_tokens, request.finish_reason) == (tokens, "length")


def test_the_models_end_ids_stop_unless_termination_id_is_set() -> None:
    tokens = free_run()
    ends = sorted({tokens[5], tokens[9]})
    ending = tiny_model(seed=6, eos_token_id=ends)
    jobs = [(prompt_of(9), params(40)), (prompt_of(9), params(40, termination_id=-1))]
    stopped, other = generate_all(tiny_engine(ending), jobs)
    first = min(tokens.index(end) for end in ends)
    assert stopped.generated_tokens == tokens[: first + 1]
    assert (stopped.finish_reason, other.finish_reason) == ("stop", "length")


def test_stop_token_ids_stop_also_with_ignore_eos() -> None:
    tokens = free_run()
    changes = {"stop_token_ids": [tokens[5]], "termination_id": tokens[2]}
    jobs = [(prompt_of(9), params(40, ignore_eos=ignores, **changes)) for ignores in (True, False)]
    ignoring, both = generate_all(tiny_engine(model()), jobs)
    assert ignoring.generated_tokens == tokens[: tokens.index(tokens[5]) + 1]
    assert both.generated_tokens == tokens[: tokens.index(tokens[2]) + 1]
    assert ignoring.finish_reason == both.finish_reason == "stop"
    assert (ignoring.stop_reason, both.stop_reason) == (tokens[5], None)


@pytest.mark.parametrize("changes", [{"termination_id": 7}, {"stop_token_ids": [3, 7]}])
def test_no_end_token_is_sampled_before_min_tokens(changes: dict[str, Any]) -> None:
    """Token 7 would always be drawn; checkpoints between do not begin to count anew."""
    wants = params(40, min_tokens=9, logit_bias={7: 100.0}, **changes)
    engine = tiny_engine(model(), kv_cache_management_mode="recompute")
    engine.add_request(prompt_of(9), wants)
    for num_steps in (3, 4):
        for _ in range(num_steps):
            assert engine.step() == []
        suspend_and_resume(engine)
    request = drain(engine)[0]
    assert len(request.generated_tokens) == 10
    assert request.generated_tokens.index(7) == 9
    assert request.finish_reason == "stop"
    assert request.stop_reason == (7 if "stop_token_ids" in changes else None)


class LetterTokenizer:
    """One token per character: id = code point - 32."""

    eos_id = None
    bos_id = None
    vocab_size = 211

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i + 32) for i in ids)


def lettered(**config: Any) -> DynamicInferenceEngine:

    config = {"block_size_tokens": 8, "buffer_size_gb": pool_gb(model(), 100)} | config
    return DynamicInferenceEngine.from_model(
        model(), InferenceConfig(**config), tokenizer=LetterTokenizer()
    )


def test_stop_words_of_several_tokens_stop_across_a_checkpoint() -> None:
    tokens = free_run()
    word = LetterTokenizer().decode(tokens[10:13])
    engine = lettered(kv_cache_management_mode="recompute")
    engine.add_request(prompt_of(9), params(40, stop_words=["nowhere to be seen", word]))
    for _ in range(12):
        assert engine.step() == []
    suspend_and_resume(engine)
    request = drain(engine)[0]
    assert request.generated_tokens == tokens[:13]
    assert request.finish_reason == "stop"


def test_add_record_encodes_stop_words_with_this_engines_tokenizer() -> None:
    tokens = free_run()
    word = LetterTokenizer().decode(tokens[10:13])
    begun = DynamicInferenceRequest(
        request_id=3,
        prompt_tokens=prompt_of(9),
        sampling_params=params(40, stop_words=["!", word]),
        seed=4,
        generated_tokens=tokens[:5],
    )
    engine = lettered()
    engine.add_record(DynamicInferenceRequestRecord.from_request(begun))
    record, ids = engine.get_record(3), [[1], tokens[10:13]]
    assert [segment.stop_word_ids for segment in record.requests] == [ids, ids]
    assert record.merge().stop_word_ids == ids
    request = drain(engine)[3]
    assert (request.generated_tokens, request.finish_reason) == (tokens[:13], "stop")
    assert request.stop_reason == word


class ForeignTokenizer(LetterTokenizer):
    """Writes every text in ids that are never drawn, so that only texts can match."""

    def encode(self, text: str) -> list[int]:
        return [210] * len(text)


def test_stop_words_found_as_text_stop_across_a_move_to_another_engine() -> None:
    tokens = free_run()
    word = ForeignTokenizer().decode(tokens[10:14])
    config = InferenceConfig(block_size_tokens=8, buffer_size_gb=pool_gb(model(), 100))
    first, second = (
        DynamicInferenceEngine.from_model(model(), config, ForeignTokenizer()) for _ in range(2)
    )
    first.add_request(prompt_of(9), params(40, stop_words=[word]), request_id=4)
    for _ in range(12):
        assert first.step() == []
    record = DynamicInferenceRequestRecord.deserialize(first.get_record(4).serialize())
    second.add_record(record)
    for engine in (first, second):
        request = drain(engine)[4]
        assert request.generated_tokens == tokens[:14]
        assert request.finish_reason == "stop"


def test_a_tokenizer_error_fails_only_the_request_with_stop_words() -> None:
    tokens = free_run()

    class Faulty(LetterTokenizer):
        def decode(self, ids: list[int]) -> str:
            if tokens[6] in ids:
                raise ZeroDivisionError("no such letter")
            return super().decode(ids)

    config = InferenceConfig(block_size_tokens=8, buffer_size_gb=pool_gb(model(), 100))
    engine = DynamicInferenceEngine.from_model(model(), config, Faulty())
    engine.add_request(prompt_of(9), params(40, stop_words=["nowhere to be seen"]))
    engine.add_request(prompt_of(9), params(40))
    finished = drain(engine)
    failed, other = finished[0], finished[1]
    assert (failed.status, failed.finish_reason) == (Status.FAILED, "error")
    assert failed.generated_tokens == tokens[: tokens.index(tokens[6]) + 1]
    *_, error, end = failed.events
    assert type(error.payload) is DetokenizeError
    assert end.type is DynamicInferenceEventType.FAIL
    assert other.generated_tokens == tokens


def test_a_stop_word_never_reaches_into_the_prompt() -> None:
    tokens, prompt = free_run(), prompt_of(9)
    word = LetterTokenizer().decode([prompt[-1], tokens[0]])
    engine = lettered()
    engine.add_request(prompt, params(40, stop_words=[word]))
    assert drain(engine)[0].generated_tokens == tokens


# ---- a forward pass that fails once


def failing_once(at_step: int, **config: Any) -> DynamicInferenceEngine:
    """The model raises in one forward pass, as a device would that ran out of memory."""
    calls = iter(range(10_000))

    def forward(_: Any) -> None:
        if next(calls) == at_step:
            raise RuntimeError("out of memory")

    return tiny_engine(model(), before_forward=forward, **config)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("at_step", [0, 1, 5])
def test_a_failed_step_requeues_its_requests_with_their_tokens(
    at_step: int, is_chunked: bool
) -> None:
    jobs = [(prompt_of(n), params(12, seed=n, return_log_probs=True)) for n in (1, 9, 30)]
    expected = generate_all(tiny_engine(model()), jobs)
    config = {"enable_chunked_prefill": True, "max_tokens": 12} if is_chunked else {}
    engine = failing_once(at_step, **config)
    for prompt, sampling in jobs:
        engine.add_request(prompt, sampling)
    impossible = engine.add_request(prompt_of(600), params())
    finished = {}
    for _ in range(at_step):
        finished |= {record.request_id: record.merge() for record in engine.step()}
    finished |= {record.request_id: record.merge() for record in engine.step()}
    assert engine.stats().num_running == engine.stats().num_blocks_used == 0
    assert engine.stats().num_waiting == 3
    finished |= drain(engine)
    assert finished[impossible].finish_reason == "error"
    for i, request in enumerate(expected):
        assert finished[i].generated_tokens == request.generated_tokens
        torch.testing.assert_close(
            finished[i].generated_log_probs, request.generated_log_probs, atol=1e-4, rtol=0
        )
        assert_ordered(finished[i])


def test_a_group_survives_a_failed_fork() -> None:
    sampling = [params(6, seed=i) for i in range(4)]
    engine = tiny_engine(model())
    engine.add_group(prompt_of(9), sampling)
    expected = drain(engine)
    for at_step in range(3):
        engine = failing_once(at_step)
        engine.add_group(prompt_of(9), sampling)
        finished = drain(engine)
        assert engine.stats().num_failed_steps == 1
        for i, request in expected.items():
            assert finished[i].generated_tokens == request.generated_tokens
        assert engine.stats().num_blocks_used == 0


def test_get_record_copies_top_n_logprobs() -> None:
    engine = tiny_engine(model())
    engine.add_request(prompt_of(5), params(4, top_n_logprobs=2))
    engine.step()
    copied = engine.get_record(0).current
    assert copied.generated_top_n_logprobs is not None
    copied.generated_top_n_logprobs[0].clear()
    request = drain(engine)[0]
    assert request.generated_top_n_logprobs is not None
    assert [len(top) for top in request.generated_top_n_logprobs] == [2, 2, 2, 2]
