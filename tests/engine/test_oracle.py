"""Random schedules of a small real engine give what a model without paging derives.

`make lives LIVES=2000` runs so many random schedules, with a fresh seed.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from rollout import SamplingParams
from tests.engine.engine_machine import EngineMachine
from tests.run_seed import run_seed
from tests.tiny_models import IS_LONG, MAX_EXCEPTIONS_PER_TOKEN

NUM_SCHEDULES = int(os.environ.get("ROLLOUT_TEST_LIVES") or (2000 if IS_LONG else 30))
NUM_SHARDS = 1 if NUM_SCHEDULES < 100 else 10  # for several workers
SCHEDULES_PER_SHARD = -(-NUM_SCHEDULES // NUM_SHARDS)
SMALL: dict[str, Any] = {
    "num_blocks": 12,
    "num_paused_blocks": None,
    "block_size_tokens": 4,
    "max_sequence_length": 32,
    "max_requests": 2,
    "max_tokens": 36,
    "enable_chunked_prefill": False,
    "kv_cache_management_mode": "persist",
    "max_kv_staleness_versions": 0,
    "track_paused_request_events": True,
    "track_generated_token_events": False,
    "enable_prefix_caching": True,
    "prefix_reuse_across_versions": True,
}
WHAT_MUST_HAPPEN = (
    "copies on write",
    "evictions",
    "forks",
    "hit tokens of older versions",
    "pauses",
    "prefix hit tokens",
    "records from elsewhere",
    "stop words",
    "text prompts",
    "tokens over mixed context",
    "top-n log-probs",
)


def test_a_promoted_request_that_moves_keeps_its_original_priority() -> None:
    class Machine(EngineMachine):
        tally, exceptions = Counter(), []

    machine = Machine()
    short = SamplingParams(num_tokens_to_generate=1, seed=0)
    long = SamplingParams(num_tokens_to_generate=12, seed=0, ignore_eos=True)
    machine.make(config={**SMALL, "tokenizer": None}, version=0, first=[short])
    machine.add(num_shared=5, tail=[3], samples=[long], priority=-1, form="ids")
    for tail in range(20):
        machine.add(num_shared=5, tail=[tail], samples=[short], priority=0, form="ids")
    modest = machine.oracle.known[1]
    while modest.order[0] == 1:
        machine.step(count=1)
    machine.move_away(choice=machine.oracle.unfinished().index(modest))
    machine.come_back(choice=0)
    machine.step(count=1)
    assert machine.engine.scheduler.requests[1].order[0] == 1
    machine.teardown()


def test_samples_whose_block_copies_failed_are_requeued() -> None:
    class Machine(EngineMachine):
        tally, exceptions = Counter(), []

    machine = Machine()
    sample = SamplingParams(num_tokens_to_generate=5, seed=0, ignore_eos=True)
    config = {**SMALL, "tokenizer": None, "max_requests": 6, "max_tokens": 10}
    config |= {"prefix_reuse_across_versions": False, "max_kv_staleness_versions": None}
    machine.make(config=config, version=0, first=[sample])
    machine.step(count=6)
    machine.add(num_shared=0, tail=[3] * 6, samples=[sample] * 3, priority=0, form="ids")
    machine.step(count=1)
    machine.add(num_shared=0, tail=[4] * 9, samples=[sample], priority=0, form="ids")
    machine.fail(after_writes=False)
    failed = machine.decisions[-1]
    assert failed.schedule.plan is not None
    assert len(failed.schedule.plan.copy_targets)
    assert len(failed.sampled) == 1, "the samples have no token in the step that copies for them"
    machine.documents_are_the_oracles()
    machine.teardown()


@pytest.mark.timeout(3600 if NUM_SHARDS > 1 else 600)  # it takes minutes to make a failure small
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_random_schedules_of_an_engine_match_the_oracle(
    shard: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Machine(EngineMachine):
        tally, exceptions = Counter(), []

    run_state_machine_as_test(
        seed(run_seed() + shard)(Machine),
        settings=settings(
            max_examples=SCHEDULES_PER_SHARD,
            stateful_step_count=40 if IS_LONG else 25,
            suppress_health_check=list(HealthCheck),
        ),
    )
    tally = dict(sorted(Machine.tally.items()))
    with capsys.disabled():
        print(f"\n{len(Machine.exceptions)} tokens that only rounding explains;", tally)
    assert Machine.tally["schedules"] >= SCHEDULES_PER_SHARD
    assert len(Machine.exceptions) <= max(1.0, tally["tokens"] * MAX_EXCEPTIONS_PER_TOKEN)
    if SCHEDULES_PER_SHARD >= 100:
        for name in WHAT_MUST_HAPPEN:
            assert tally[name] >= SCHEDULES_PER_SHARD // 20, name
