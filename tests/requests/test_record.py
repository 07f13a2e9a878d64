"""Records: any number of checkpoints merge to the request without them."""

from __future__ import annotations

import math
import time

import msgpack
import pytest
import torch

from rollout.errors import EngineStateError, ProtocolError
from rollout.requests import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    DynamicVLMInferenceRequest,
    Status,
    compute_block_hashes_batched,
)
from rollout.sampling_params import SamplingParams

EventType = DynamicInferenceEventType


def record_of(**fields) -> DynamicInferenceRequestRecord:
    """A record of one request with prompt 10, 11, 12."""
    fields = {"request_id": 5, "prompt_tokens": [10, 11, 12], **fields}
    return DynamicInferenceRequestRecord.from_request(DynamicInferenceRequest(**fields))


def event_at(timestamp: float, event_type: EventType) -> DynamicInferenceEvent:
    """An event of a hand-made time."""
    payload = {"token_id": 1} if event_type is EventType.GENERATED_TOKEN else None
    return DynamicInferenceEvent(type=event_type, timestamp=timestamp, payload=payload)


# ---- checkpoint


def test_checkpoint_prompts_with_everything_so_far():
    record = record_of(generated_tokens=[1, 2], prompt="abc", generated_text="de")
    record.checkpoint()
    assert len(record.requests) == 2
    assert record.current is record[1]
    assert record.current.prompt_tokens.tolist() == [10, 11, 12, 1, 2]
    assert record.current.generated_tokens == []
    assert record.current.prompt is None
    assert record.current.generated_text is None
    assert record.current.status is Status.WAITING_IN_QUEUE
    assert record.current.remaining_prompt_length == 5


def test_checkpoint_and_merge_keep_that_kv_versions_are_bounds():
    record = record_of(generated_tokens=[1, 2], kv_versions_are_bounds=True)
    record.checkpoint()
    assert record.current.kv_versions_are_bounds
    assert record.merge().kv_versions_are_bounds
    assert not record_of(generated_tokens=[1]).merge().kv_versions_are_bounds


def test_checkpoint_leaves_the_earlier_segment_alone():
    record = record_of(
        generated_tokens=[1, 2], sampling_params=SamplingParams(num_tokens_to_generate=9)
    )
    before = record[0].serialize()
    record.checkpoint()
    record.current.generated_tokens.append(3)
    record.current.policy_spans.append(1, 4)
    assert record[0].serialize() == before


def test_checkpoint_reduces_the_tokens_to_generate_each_time():
    record = record_of(sampling_params=SamplingParams(num_tokens_to_generate=9, temperature=0.5))
    for num_tokens in (2, 3):
        record.current.generated_tokens += range(num_tokens)
        record.checkpoint()
    assert record.current.sampling_params == SamplingParams(
        num_tokens_to_generate=4, temperature=0.5
    )
    assert record[0].sampling_params.num_tokens_to_generate == 9


def test_checkpoint_keeps_the_limit_on_all_tokens():
    record = record_of(generated_tokens=[1, 2], sampling_params=SamplingParams(num_tokens_total=20))
    record.checkpoint()
    assert record.current.sampling_params.num_tokens_total == 20


def test_checkpoint_of_a_request_with_nothing_left_is_refused():
    record = record_of(
        generated_tokens=[1, 2], sampling_params=SamplingParams(num_tokens_to_generate=2)
    )
    with pytest.raises(EngineStateError, match="request 5 has generated all"):
        record.checkpoint()
    assert len(record.requests) == 1


def test_checkpoint_keeps_what_identifies_the_request():
    record = record_of(
        seed=11, priority=2, weights_version=3, arrival_time=1.5, stop_word_ids=[[1, 2]]
    )
    added = record.current.add_event_add_engine()
    record.checkpoint()
    current = record.current
    assert (current.seed, current.priority, current.weights_version) == (11, 2, 3)
    assert (current.request_id, current.arrival_time) == (5, 1.5)
    assert current.stop_word_ids == [[1, 2]]
    assert current.event_add_engine is added
    assert current.events == []


def test_checkpoint_of_a_request_that_was_in_no_engine_logs_its_entry_once():
    record = record_of(generated_tokens=[1])
    before = time.time()
    record.checkpoint()
    (entry,) = record.current.events
    assert entry.type is EventType.ADD_ENGINE
    assert before <= entry.timestamp <= time.time()
    assert record.current.event_add_engine is entry
    record.current.generated_tokens = [2]
    record.checkpoint()
    assert record.current.event_add_engine is entry
    assert len([event for segment in record.requests for event in segment.events]) == 1


def test_checkpoint_of_a_record_from_the_wire_keeps_the_time_of_its_entry():
    record = record_of(generated_tokens=[1])
    record.current.events.append(event_at(100.0, EventType.ADD_ENGINE))
    received = DynamicInferenceRequestRecord.deserialize(record.serialize())
    assert received.current.event_add_engine is None
    received.checkpoint()
    assert received.current.event_add_engine.timestamp == 100.0
    assert len([event for segment in received.requests for event in segment.events]) == 1


def test_checkpoint_hashes_the_longer_prompt():
    record = record_of(generated_tokens=[1, 2, 3], enable_prefix_caching=True, block_size_tokens=2)
    record.checkpoint()
    assert record.current.enable_prefix_caching
    assert record.current.precomputed_block_hashes == compute_block_hashes_batched(
        [10, 11, 12, 1, 2, 3], 2
    )


def test_twenty_checkpoints_keep_one_prompt_in_memory_and_on_the_wire():
    record = record_of(prompt_tokens=torch.arange(10_000), seed=3)
    num_bytes_before = len(msgpack.packb(record.serialize()))
    for token in range(20):
        record.current.generated_tokens.append(token)
        record.checkpoint()
    storages = {s.prompt_tokens.data_ptr(): s.prompt_tokens for s in record.requests}
    kept = sum(prompt.untyped_storage().nbytes() for prompt in storages.values())
    assert kept == 8 * (10_000 + 20)
    assert len(msgpack.packb(record.serialize())) < num_bytes_before + 20 * 1200


def test_every_segment_reads_its_own_prompt_also_after_the_wire():
    record = record_of()
    for token in range(3):
        record.current.generated_tokens.append(token)
        record.checkpoint()
    restored = DynamicInferenceRequestRecord.deserialize(record.serialize())
    for segments in (record.requests, restored.requests):
        prompts = [segment.prompt_tokens.tolist() for segment in segments]
        assert prompts == [[10, 11, 12, 0, 1, 2][:end] for end in range(3, 7)]


def test_segments_that_do_not_go_on_from_one_another_keep_their_prompts_on_the_wire():
    parts = [record_of(generated_tokens=[1])[0], record_of(prompt_tokens=[7, 8, 9, 1])[0]]
    restored = DynamicInferenceRequestRecord.deserialize(
        DynamicInferenceRequestRecord(parts).serialize()
    )
    assert [s.prompt_tokens.tolist() for s in restored.requests] == [[10, 11, 12], [7, 8, 9, 1]]


@pytest.mark.parametrize("tokens", [None, ["x"], [2**70], [[1]]])
def test_segment_without_prompt_behind_one_without_tokens_is_refused(tokens):
    record = record_of(generated_tokens=[1])
    record.checkpoint()
    encoded = record.serialize()
    encoded["requests"][0]["generated_tokens"] = tokens
    with pytest.raises(ProtocolError, match="a token field of a segment has no tokens"):
        DynamicInferenceRequestRecord.deserialize(encoded)


def test_copy_shares_nothing_that_grows():
    record = record_of(generated_tokens=[1], prompt_log_probs=[-1.0, -2.0])
    record.checkpoint()
    before = record.serialize()
    copied = record.copy()
    assert copied.serialize() == before
    for segment in copied.requests:
        segment.generated_tokens.append(2)
        segment.policy_spans.append(1, 7)
        segment.add_event_pause()
        segment.prompt_tokens[0] = 99
    copied.checkpoint()
    assert record.serialize() == before


def test_checkpoint_empties_the_lists_that_were_asked_for():
    record = record_of(generated_tokens=[1], generated_log_probs=[-0.5], tpot=[0.1])
    record.checkpoint()
    assert record.current.generated_log_probs == []
    assert record.current.tpot == []
    assert record.current.generated_top_n_logprobs is None


def test_checkpoint_keeps_the_images():
    request = DynamicVLMInferenceRequest(
        request_id=5,
        prompt_tokens=[1],
        num_img_embeddings_per_tile=4,
        imgs=torch.ones(1, 2),
        num_tiles=torch.tensor([1]),
        decoder_seq_length=9,
    )
    record = DynamicInferenceRequestRecord.from_request(request)
    record.checkpoint()
    assert record.current.imgs is request.imgs
    wire = msgpack.unpackb(msgpack.packb(record.serialize()))
    restored = DynamicInferenceRequestRecord.deserialize(wire).current
    assert torch.equal(restored.imgs, request.imgs)
    assert restored.decoder_seq_length == 9


# ---- merge


def test_merge_joins_the_segments():
    record = record_of(
        generated_tokens=[1, 2],
        generated_log_probs=[-0.5, -1.0],
        generated_top_n_logprobs=[{1: -0.5}, {2: -1.0}],
        prompt_log_probs=[-3.0, -4.0],
        tpot=[0.1, 0.2],
        generated_text="ab",
        sampling_params=SamplingParams(num_tokens_to_generate=9),
        context_kv_version_min=[0, 0],
        context_kv_version_mean=[0.0, 0.5],
    )
    record.current.add_event_add_engine()
    record.checkpoint()
    current = record.current
    current.generated_tokens += [3]
    current.generated_log_probs += [-2.0]
    current.generated_top_n_logprobs += [{3: -2.0}]
    current.tpot += [0.3]
    current.generated_text = "c"
    current.prompt_log_probs = [-9.0] * 4
    current.context_kv_version_min += [1]
    current.context_kv_version_mean += [1.0]
    current.add_event_finish()
    current.status, current.finish_reason = Status.COMPLETED, "stop"
    record.latency = 2.5

    merged = record.merge()
    assert merged.prompt_tokens.tolist() == [10, 11, 12]
    assert merged.generated_tokens == [1, 2, 3]
    assert merged.generated_length == 3
    assert merged.generated_log_probs.dtype == torch.float32
    assert merged.generated_log_probs.tolist() == [-0.5, -1.0, -2.0]
    assert merged.prompt_log_probs.dtype == torch.float32
    assert merged.prompt_log_probs.tolist() == [-3.0, -4.0]
    assert merged.generated_top_n_logprobs == [{1: -0.5}, {2: -1.0}, {3: -2.0}]
    assert merged.tpot == [0.1, 0.2, 0.3]
    assert merged.generated_text == "abc"
    assert merged.sampling_params.num_tokens_to_generate == 9
    assert merged.context_kv_version_min == [0, 0, 1]
    assert merged.context_kv_version_mean == [0.0, 0.5, 1.0]
    assert [event.type.name for event in merged.events] == ["ADD_ENGINE", "FINISH"]
    assert merged.event_add_engine is record[0].event_add_engine
    assert (merged.status, merged.finish_reason) == (Status.COMPLETED, "stop")
    assert merged.latency == 2.5


def test_merge_of_many_checkpoints_keeps_every_token_in_order():
    record = record_of()
    for token in range(20):
        record.current.generated_tokens.append(token)
        record.checkpoint()
    assert record.merge().generated_tokens == list(range(20))
    assert record.current.prompt_tokens.tolist() == [10, 11, 12, *range(20)]


def test_merge_leaves_the_record_alone():
    record = record_of(generated_tokens=[1], generated_log_probs=[-0.5])
    merged = record.merge()
    merged.generated_tokens.append(2)
    merged.policy_spans.append(1, 7)
    merged.events.append(event_at(0.0, EventType.PAUSE))
    assert record[0].generated_tokens == [1]
    assert record[0].generated_log_probs == [-0.5]
    assert len(record[0].policy_spans) == 3
    assert record[0].events == []


@pytest.mark.parametrize("values", [None, []])
def test_segment_without_values_contributes_placeholders(values):
    record = record_of(
        generated_tokens=[1, 2],
        generated_log_probs=[-0.5, -1.0],
        generated_top_n_logprobs=[{1: -0.5}, {2: -1.0}],
        tpot=[0.1, 0.2],
    )
    record.checkpoint()
    current = record.current
    current.generated_tokens += [3, 4]
    current.generated_log_probs = current.generated_top_n_logprobs = current.tpot = values
    merged = record.merge()
    assert merged.generated_log_probs[:2].tolist() == [-0.5, -1.0]
    assert merged.generated_log_probs.isnan().tolist() == [False, False, True, True]
    assert merged.generated_top_n_logprobs == [{1: -0.5}, {2: -1.0}, None, None]
    assert [math.isnan(seconds) for seconds in merged.tpot] == [False, False, True, True]


def test_prompt_log_probs_of_an_evicted_prefill_are_those_of_its_second_run():
    record = record_of(prompt_log_probs=[-3.0], prompt_top_n_logprobs=[{11: -3.0}])
    record.checkpoint()
    record.current.prompt_log_probs = [-3.0, -4.0]
    record.current.prompt_top_n_logprobs = [{11: -3.0}, {12: -4.0}]
    record.current.generated_tokens.append(1)
    record.checkpoint()
    record.current.prompt_log_probs = [-9.0] * 3
    merged = record.merge()
    assert merged.prompt_log_probs.tolist() == [-3.0, -4.0]
    assert merged.prompt_top_n_logprobs == [{11: -3.0}, {12: -4.0}]


def test_values_that_no_segment_has_stay_none():
    record = record_of(generated_tokens=[1])
    record.checkpoint()
    merged = record.merge()
    assert merged.generated_log_probs is None
    assert merged.prompt_log_probs is None
    assert merged.generated_top_n_logprobs is None
    assert merged.tpot is None
    assert merged.routing_indices is None
    assert merged.generated_text is None


def test_log_probs_that_were_asked_for_are_an_empty_tensor_without_tokens():
    assert record_of(generated_log_probs=[]).merge().generated_log_probs.shape == (0,)


def test_merging_a_merged_request_changes_nothing():
    record = record_of(generated_tokens=[1], generated_log_probs=[-0.5], tpot=[0.1])
    merged = record.merge()
    again = DynamicInferenceRequestRecord.from_request(merged).merge()
    assert again.serialize() == merged.serialize()


def routing_of(*ids: int) -> torch.Tensor:
    """A row of two layers for each id, -1 for an unknown one."""
    return torch.tensor(ids, dtype=torch.int16)[:, None, None].expand(-1, 2, 1)


def test_a_row_of_the_routing_is_of_the_first_segment_that_knows_it():
    """The segment that drew from it: what is computed again later does not rewrite history."""
    record = record_of(generated_tokens=[1], routing_indices=routing_of(10, 11, 12))
    record.checkpoint()
    assert record.current.routing_indices is None
    record.current.generated_tokens += [2, 3]
    record.current.routing_indices = routing_of(20, 21, 22, 23, 24)
    merged = record.merge()
    assert merged.num_tokens == 6
    assert torch.equal(merged.routing_indices, routing_of(10, 11, 12, 23, 24))
    assert merged.routing_indices.dtype == torch.int16
    assert torch.equal(record[0].routing_indices, routing_of(10, 11, 12)), "it did not change"


def test_rows_that_no_segment_knows_are_no_expert():
    record = record_of(generated_tokens=[1], routing_indices=routing_of(-1, 11))
    record.checkpoint()
    record.current.generated_tokens.append(2)
    assert torch.equal(record.merge().routing_indices, routing_of(-1, 11, -1, -1))
    record.current.routing_indices = routing_of(20, 21)
    assert torch.equal(record.merge().routing_indices, routing_of(20, 11, -1, -1))


def test_routing_of_bytes_has_room_for_unknown_rows():
    record = record_of(generated_tokens=[1], routing_indices=routing_of(200, 11).to(torch.uint8))
    assert torch.equal(record.merge().routing_indices, routing_of(200, 11, -1))


def test_first_token_of_a_later_segment_sets_the_time_to_first_token():
    record = record_of()
    record.current.event_add_engine = event_at(100.0, EventType.ADD_ENGINE)
    record.checkpoint()
    record.current.events += [
        event_at(101.0, EventType.ADD_CONTEXT),
        event_at(102.5, EventType.GENERATED_TOKEN),
        event_at(103.0, EventType.GENERATED_TOKEN),
    ]
    assert record.merge().ttft == 2.5


def test_merge_keeps_a_ttft_that_an_engine_set():
    record = record_of(ttft=0.25)
    record.checkpoint()
    record.current.ttft = 9.0
    assert record.merge().ttft == 0.25
    assert record_of().merge().ttft is None


# ---- the record itself


def test_record_names_its_request():
    record = record_of()
    record.checkpoint()
    assert record.request_id == 5
    assert record[0] is record.requests[0]
    assert record[-1] is record.current


def test_record_survives_the_wire():
    record = record_of(
        generated_tokens=[1],
        generated_log_probs=[-0.5],
        sampling_params=SamplingParams(stop_words="END"),
    )
    record.current.add_event_add_engine()
    record.checkpoint()
    record.current.generated_tokens.append(2)
    record.latency = 1.5
    wire = msgpack.unpackb(msgpack.packb(record.serialize()))
    restored = DynamicInferenceRequestRecord.deserialize(wire)
    assert restored.serialize() == record.serialize()
    assert restored.merge().generated_tokens == [1, 2]
    assert restored.latency == 1.5


def test_restored_record_can_go_on():
    record = record_of(generated_tokens=[1], generated_log_probs=[-0.5])
    restored = DynamicInferenceRequestRecord.deserialize(record.serialize())
    restored.checkpoint()
    restored.current.generated_tokens.append(2)
    restored.current.generated_log_probs.append(-1.0)
    assert restored.merge().generated_log_probs.tolist() == [-0.5, -1.0]
    assert record[0].generated_tokens == [1]


def test_malformed_record_is_refused():
    with pytest.raises(ProtocolError, match="latencies"):
        DynamicInferenceRequestRecord.deserialize({"requests": [], "latencies": 1.0})
