"""Versions and staleness of records, alone and in an engine.

The reference history: prompt of 8, then 3 tokens, update, 3 tokens, update, 2 tokens.
"""

from __future__ import annotations

import msgpack
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.requests import DynamicInferenceRequest, DynamicInferenceRequestRecord


def new_record(num_prompt_tokens: int = 8, version: int = 0) -> DynamicInferenceRequestRecord:
    """A record of a fresh request."""
    return DynamicInferenceRequestRecord.from_request(
        DynamicInferenceRequest(
            request_id=1, prompt_tokens=list(range(num_prompt_tokens)), weights_version=version
        )
    )


def generate(record: DynamicInferenceRequestRecord, num_tokens: int, version: int) -> None:
    """Generate tokens under `version` as an engine does: write missing KV, sample, repeat."""
    request = record.current
    for _ in range(num_tokens):
        request.kv_spans.append(request.num_tokens - len(request.kv_spans), version)
        request.context_kv_version_min.append(request.kv_spans.min())
        request.context_kv_version_mean.append(request.kv_spans.sum() / len(request.kv_spans))
        request.generated_tokens.append(100 + len(request.generated_tokens))
        request.policy_spans.append(1, version)


def runs(staleness: torch.Tensor) -> str:
    """Staleness in the notation age x count."""
    assert staleness.dtype == torch.int32
    ages, counts = torch.unique_consecutive(staleness, return_counts=True)
    return ", ".join(f"{a}x{c}" for a, c in zip(ages.tolist(), counts.tolist(), strict=True))


def test_free_standing_record_gives_the_reference_numbers():
    record = new_record()
    for num_tokens in (3, 3, 2):
        if record.current.generated_tokens:
            record.increment_staleness()
        record.current.generated_tokens += range(num_tokens)
    for request in (record.merge(), record.current):
        assert runs(request.policy_staleness) == "2x11, 1x3, 0x2"
        assert runs(request.kv_cache_staleness) == "2x11, 1x3, 0x2"
    assert record.merge().policy_versions.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_kept_kv_gives_the_reference_numbers():
    record = new_record()
    for version, num_tokens in enumerate((3, 3, 2)):
        generate(record, num_tokens, version)
    record.current.freeze_versions(2)
    request = record.merge()
    assert runs(request.policy_staleness) == "2x11, 1x3, 0x2"
    assert runs(request.kv_cache_staleness) == "2x10, 1x3, 0x3"


def test_recomputed_kv_gives_the_reference_numbers():
    record = new_record()
    for version, num_tokens in enumerate((3, 3, 2)):
        if version:
            record.checkpoint()
        generate(record, num_tokens, version)
    record.current.freeze_versions(2)
    request = record.merge()
    assert runs(request.policy_staleness) == "2x11, 1x3, 0x2"
    assert runs(request.kv_cache_staleness) == "0x16"
    assert request.policy_versions.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert request.context_kv_version_min == [0, 0, 0, 1, 1, 1, 2, 2]


def test_context_versions_of_kept_kv_are_those_at_sampling_time():
    record = new_record(num_prompt_tokens=2)
    generate(record, 1, 0)
    generate(record, 2, 1)
    request = record.merge()
    assert request.context_kv_version_min == [0, 0, 0]
    assert request.context_kv_version_mean == [0.0, 1 / 3, 2 / 4]


def test_staleness_is_none_before_the_first_increment_and_zero_in_a_merge():
    record = new_record()
    assert record.current.policy_staleness is None
    assert record.current.kv_cache_staleness is None
    assert runs(record.merge().policy_staleness) == "0x8"
    assert runs(record.merge().kv_cache_staleness) == "0x8"


def test_kv_clock_stands_still_for_policy_only_increments():
    record = new_record()
    record.increment_staleness(policy_only=True)
    assert runs(record.current.policy_staleness) == "1x8"
    assert runs(record.current.kv_cache_staleness) == "0x8"
    record.increment_staleness()
    assert runs(record.current.policy_staleness) == "2x8"
    assert runs(record.current.kv_cache_staleness) == "1x8"


def test_checkpoint_carries_policy_ages_and_resets_kv_ages():
    record = new_record()
    record.current.generated_tokens += [1, 2]
    record.increment_staleness()
    record.current.generated_tokens += [3]
    record.checkpoint()
    assert runs(record.current.policy_staleness) == "1x10, 0x1"
    assert runs(record.current.kv_cache_staleness) == "0x11"
    record.increment_staleness()
    assert runs(record.merge().policy_staleness) == "2x10, 1x1"
    assert runs(record.merge().kv_cache_staleness) == "1x11"


@given(st.lists(st.sampled_from(["token", "age", "age policy", "checkpoint"]), max_size=20))
def test_free_standing_ages_are_those_of_plain_counters(actions):
    record = new_record(num_prompt_tokens=2)
    policy_ages, kv_ages = [0, 0], [0, 0]
    for action in actions:
        if action == "token":
            record.current.generated_tokens.append(7)
            policy_ages.append(0)
            kv_ages.append(0)
        elif action == "checkpoint":
            record.checkpoint()
            kv_ages = [0] * len(kv_ages)
        else:
            record.increment_staleness(policy_only=action == "age policy")
            policy_ages = [age + 1 for age in policy_ages]
            if action == "age":
                kv_ages = [age + 1 for age in kv_ages]
    merged = record.merge()
    assert merged.policy_staleness.tolist() == policy_ages
    assert merged.kv_cache_staleness.tolist() == kv_ages


def test_engine_record_reports_ages_at_the_observed_version():
    record = new_record(version=3)
    generate(record, 2, 3)
    record.observe_version(5)
    assert runs(record.current.policy_staleness) == "2x10"
    assert runs(record.current.kv_cache_staleness) == "2x9, 0x1"
    assert runs(record.merge().kv_cache_staleness) == "2x9, 0x1"


def test_finished_request_keeps_its_ages():
    record = new_record()
    generate(record, 2, 0)
    generate(record, 1, 1)
    record.current.freeze_versions(1)
    request = record.merge()
    record.observe_version(9)
    record.increment_staleness()
    for frozen in (request, record.current, record.merge()):
        assert frozen.completed_at_version == 1
        assert runs(frozen.policy_staleness) == "1x10, 0x1"
        assert runs(frozen.kv_cache_staleness) == "1x9, 0x2"


def test_finished_request_gives_its_ages_at_any_later_version():
    record = new_record()
    generate(record, 2, 0)
    record.current.freeze_versions(0)
    policy, kv = record.merge().staleness_at(4)
    assert (runs(policy), runs(kv)) == ("4x10", "4x10")


def test_unwritten_kv_of_a_running_request_is_never_stale():
    record = new_record()
    generate(record, 1, 0)
    policy, kv = record.current.staleness_at(4)
    assert (runs(policy), runs(kv)) == ("4x9", "4x8, 0x1")


def test_last_token_of_an_aborted_request_is_frozen_at_the_version_that_sampled_it():
    record = new_record()
    generate(record, 1, 0)
    record.current.freeze_versions(2)
    assert runs(record.current.kv_cache_staleness) == "2x9"


def test_request_aborted_in_the_queue_has_no_kv_to_be_stale():
    record = new_record(version=1)
    record.current.freeze_versions(3)
    assert runs(record.current.policy_staleness) == "2x8"
    assert runs(record.current.kv_cache_staleness) == "0x8"


def test_versions_survive_the_wire():
    record = new_record()
    generate(record, 3, 0)
    generate(record, 2, 1)
    record.observe_version(4)
    wire = msgpack.unpackb(msgpack.packb(record.serialize()))
    restored = DynamicInferenceRequestRecord.deserialize(wire).merge()
    merged = record.merge()
    assert torch.equal(restored.policy_staleness, merged.policy_staleness)
    assert torch.equal(restored.kv_cache_staleness, merged.kv_cache_staleness)
    assert torch.equal(restored.policy_versions, merged.policy_versions)
    assert restored.context_kv_version_mean == merged.context_kv_version_mean
