"""Under every schedule, row p of `routing_indices` is of the first pass that computed position p.

Shape letters are those of `rollout.blocks.routing_record`.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from rollout import EngineState, SamplingParams
from tests.engine.routed_engine import VOCAB, RoutedEngine, model
from tests.run_seed import run_seed
from tests.tiny_models import IS_LONG

NUM_SCHEDULES = 100 if IS_LONG else 10
# Prompts start alike, so that they find each other's blocks.
SHARED_TEXT = [3, 17, 4, 4, 9, 21, 0, 11, 5, 5, 8, 14, 2, 19, 7, 7, 1, 23, 10, 6]
WHAT_MUST_HAPPEN = (
    *("copies on write", "evictions", "failed steps", "forks", "hit tokens", "rows"),
    *("rows of others", "suspends offload", "suspends persist", "suspends recompute"),
    *("aborts", "moves", "unknown rows", "updates"),
)


def random_config(chooser: random.Random) -> dict[str, Any]:
    config: dict[str, Any] = {
        "num_blocks": chooser.randint(9, 20),
        "overlaps": chooser.random() < 0.6,
        "block_size_tokens": 4,
        "max_sequence_length": 32,
        "max_requests": chooser.randint(2, 8),
        "max_tokens": chooser.randint(8, 40),
        "enable_chunked_prefill": chooser.random() < 0.7,
        "schedule_conservativeness": 0.0,
        "max_kv_staleness_versions": chooser.choice((None, None, 0, 1)),
    }
    if chooser.random() < 0.8:
        config |= {
            "enable_prefix_caching": True,
            "prefix_caching_eviction_policy": chooser.choice(("ref_zero", "lru")),
            "prefix_reuse_across_versions": chooser.random() < 0.5,
        }
    return config


class Schedule:
    """One engine, and random operations on it."""

    def __init__(self, seed: int) -> None:
        self.chooser = random.Random(seed)
        self.routed = RoutedEngine(**random_config(self.chooser))
        self.engine, self.tally = self.routed.engine, self.routed.tally

    def run(self) -> Counter[str]:
        actions = [self.add] * 4 + [self.step] * 8
        actions += [self.abort, self.move, self.suspend, self.suspend, self.update, self.fail]
        for _ in range(40):
            self.chooser.choice(actions)()
            if self.chooser.random() < 0.3:
                self.routed.check_unfinished()
        for _ in range(2000):
            if not self.routed.unfinished():
                return self.tally
            self.routed.step()
        raise AssertionError(f"unfinished: {self.engine.stats()}")

    def add(self) -> None:
        chooser = self.chooser
        prompt = SHARED_TEXT[: chooser.randint(1, len(SHARED_TEXT))]
        prompt = prompt + [chooser.randrange(VOCAB) for _ in range(chooser.randint(0, 3))]
        samples = [
            SamplingParams(
                num_tokens_to_generate=chooser.randint(1, 32 - len(prompt)),
                seed=chooser.randrange(100),
                termination_id=chooser.choice((None, 5)),
            )
            for _ in range(chooser.choice((1, 1, 3)))
        ]
        self.routed.add(prompt, samples)

    def step(self) -> None:
        self.routed.step(self.chooser.randint(1, 4))

    def abort(self) -> None:
        if unfinished := self.routed.unfinished():
            self.routed.abort(self.chooser.choice(unfinished))
            self.tally["aborts"] += 1

    def move(self) -> None:
        if unfinished := [i for i in self.routed.unfinished() if not self.routed.has_ended(i)]:
            self.routed.move(self.chooser.choice(unfinished))
            self.tally["moves"] += 1

    def suspend(self) -> None:
        mode = self.chooser.choice(("persist", "offload", "recompute"))
        self.engine.pause()
        self.engine.suspend(mode)
        self.tally[f"suspends {mode}"] += 1
        if self.chooser.random() < 0.3:
            self.abort()
        if self.chooser.random() < 0.3:
            self.engine.set_generation_epoch(self.engine.weights_version + 1)
        self.engine.resume()
        self.engine.unpause()

    def update(self) -> None:
        self.engine.update_weights(model(), in_flight=True)
        self.tally["updates"] += 1

    def fail(self) -> None:
        self.routed.fault = self.chooser.choice(("launch", "fetch"))
        num_failed = self.engine.stats().num_failed_steps
        try:
            self.routed.step()
        except RuntimeError:  # it is not one request's: steps without any fail, too
            assert self.engine.state is EngineState.RUNNING
        self.routed.fault = None
        self.tally["failed steps"] += self.engine.stats().num_failed_steps - num_failed


def test_routing_indices_are_right_under_random_schedules(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tally: Counter[str] = Counter()
    for index in range(NUM_SCHEDULES):
        tally += Schedule(run_seed() + index).run()
    with capsys.disabled():
        print(f"\n{NUM_SCHEDULES} schedules from seed {run_seed()}:", dict(sorted(tally.items())))
    for name in WHAT_MUST_HAPPEN if IS_LONG else ("rows", "rows of others"):
        assert tally[name] > 0, name
