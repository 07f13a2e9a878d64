"""Random lives of a small real engine are those that a model without paging derives.

`make lives LIVES=2000` lives that many, with a fresh seed, and does nothing else.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from rollout import SamplingParams
from tests.engine.engine_life import EngineLife
from tests.run_seed import run_seed
from tests.tiny_models import IS_LONG, MAX_EXCEPTIONS_PER_TOKEN

NUM_LIVES = int(os.environ.get("ROLLOUT_TEST_LIVES") or (2000 if IS_LONG else 30))
NUM_SHARDS = 1 if NUM_LIVES < 100 else 10  # for several workers
LIVES_PER_SHARD = -(-NUM_LIVES // NUM_SHARDS)
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


def test_a_promoted_request_that_moves_comes_back_with_the_priority_it_was_given() -> None:
    class Life(EngineLife):
        tally, exceptions = Counter(), []

    life = Life()
    short = SamplingParams(num_tokens_to_generate=1, seed=0)
    long = SamplingParams(num_tokens_to_generate=12, seed=0, ignore_eos=True)
    life.make(config={**SMALL, "tokenizer": None}, version=0, first=[short])
    life.add(num_shared=5, tail=[3], samples=[long], priority=-1, form="ids")
    for tail in range(20):
        life.add(num_shared=5, tail=[tail], samples=[short], priority=0, form="ids")
    modest = life.oracle.known[1]
    while modest.order[0] == 1:
        life.step(count=1)
    life.move_away(choice=life.oracle.unfinished().index(modest))
    life.come_from_elsewhere(choice=0)
    life.step(count=1)
    assert life.engine.scheduler.requests[1].order[0] == 1
    life.teardown()


def test_samples_whose_blocks_a_failed_step_was_to_copy_start_again_with_those_it_ran() -> None:
    class Life(EngineLife):
        tally, exceptions = Counter(), []

    life = Life()
    sample = SamplingParams(num_tokens_to_generate=5, seed=0, ignore_eos=True)
    config = {**SMALL, "tokenizer": None, "max_requests": 6, "max_tokens": 10}
    config |= {"prefix_reuse_across_versions": False, "max_kv_staleness_versions": None}
    life.make(config=config, version=0, first=[sample])
    life.step(count=6)
    life.add(num_shared=0, tail=[3] * 6, samples=[sample] * 3, priority=0, form="ids")
    life.step(count=1)
    life.add(num_shared=0, tail=[4] * 9, samples=[sample], priority=0, form="ids")
    life.fail(after_writes=False)
    failed = life.decisions[-1]
    assert failed.schedule.plan is not None
    assert len(failed.schedule.plan.copy_targets)
    assert len(failed.sampled) == 1, "the samples have no token in the step that copies for them"
    life.documents_are_the_oracles()
    life.teardown()


@pytest.mark.timeout(3600 if NUM_SHARDS > 1 else 600)  # it takes minutes to make a failure small
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_random_lives_of_an_engine_are_those_of_the_oracle(
    shard: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Life(EngineLife):
        tally, exceptions = Counter(), []

    run_state_machine_as_test(
        seed(run_seed() + shard)(Life),
        settings=settings(
            max_examples=LIVES_PER_SHARD,
            stateful_step_count=40 if IS_LONG else 25,
            suppress_health_check=list(HealthCheck),
        ),
    )
    tally = dict(sorted(Life.tally.items()))
    with capsys.disabled():
        print(f"\n{len(Life.exceptions)} tokens that only rounding explains;", tally)
    assert Life.tally["lives"] >= LIVES_PER_SHARD
    assert len(Life.exceptions) <= max(1.0, tally["tokens"] * MAX_EXCEPTIONS_PER_TOKEN)
    if LIVES_PER_SHARD >= 100:
        for name in WHAT_MUST_HAPPEN:
            assert tally[name] >= LIVES_PER_SHARD // 20, name
