"""Random schedules of an engine over vLLM: every token is what its record says, by transformers.

`make test-vllm`; NUM_SCHEDULES of them with ROLLOUT_TEST_LONG=1.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from rollout import EngineState, SamplingParams
from rollout.engine.engine import Engine
from rollout.errors import WeightUpdateError
from rollout.requests.record import DynamicInferenceRequestRecord
from tests.contracts.vllm_engines import (
    DEVICE,
    HAS_VLLM,
    adapted_model,
    allow_async_scheduling,
    vllm_adapter,
    vllm_engine,
    vllm_weights,
)
from tests.rollout_vllm.replay import Replay
from tests.run_seed import run_seed
from tests.tiny_models import IS_LONG, VOCAB_SIZE

if not HAS_VLLM:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

NUM_SCHEDULES = 80 if IS_LONG else 3  # of each engine
NUM_OPERATIONS = 30
NUM_MODELS = 3
SHARED = [(7 * i * i + 3) % VOCAB_SIZE for i in range(140)]  # prompts begin alike
WORST_GAP = 1e-4 if DEVICE == "cpu" else 2e-2  # vLLM's attention on CUDA multiplies in TF32
# A pool of so few blocks that requests are preempted.
SMALL: dict[str, Any] = {
    "enable_prefix_caching": True,
    "num_blocks": 10,
    "max_sequence_length": 256,
}
NUM_ADAPTERS = 2
# The drafts of a request are tokens that followed its last token before.
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefixes": {"enable_prefix_caching": True},
    "small pool": SMALL,
    "bound": {**SMALL, "max_kv_staleness_versions": 1},
    "drafts": {
        **SMALL,
        "max_kv_staleness_versions": 1,
        "engine_options": {"speculative_config": DRAFTS},
    },
    "async": {
        **SMALL,
        "max_kv_staleness_versions": 1,
        "engine_options": {"async_scheduling": True},
    },
    "two ranks": {**SMALL, "tensor_parallel_size": 2},
}


class Schedules:
    """Runs random operations on an engine, and checks the records of all requests that end."""

    def __init__(
        self,
        engine: Engine,
        chance: random.Random,
        max_age: int | None,
        family: str = "qwen3",
        *,
        by_token: bool = False,
    ) -> None:
        self.engine, self.chance, self.max_age = engine, chance, max_age
        # Seeds of model and adapter, by version.
        self.models: dict[int, tuple[int, int | None]] = {engine.weights_version: (0, None)}
        self.family = family
        self.operations = (*OPERATIONS, *(ADAPTERS if family == "qwen3" else ()))
        self.replay = Replay(
            lambda version: adapted_model(*self.models[version], family), by_token=by_token
        )
        self.tally: Counter[str] = Counter()
        self.away: list[bytes] = []
        self.returned: list[int] = []
        self.expected: set[int] = set()
        self.worst_age = 0
        self.temperatures: tuple[float, ...] = (0.0, 1.0, 0.7)

    def run(self) -> None:
        """Run one schedule to the end of all its requests."""
        self.add()
        for _ in range(NUM_OPERATIONS):
            operation = self.chance.choice(self.operations)
            operation(self)
            self.engine.check_integrity(may_be_in_flight=True)
        self.to_running()
        while self.away:
            self.come_back()
        while self.engine.has_unfinished_requests():
            self.step()
        self.engine.check_integrity(may_be_in_flight=True)
        assert sorted(self.returned) == sorted(self.expected), "each request ends once"
        self.tally["schedules"] += 1

    # ---- operations

    def add(self) -> None:
        length = self.chance.randint(1, 120)
        prompt = [*SHARED[:length], self.chance.randrange(VOCAB_SIZE)]
        params = SamplingParams(
            num_tokens_to_generate=self.chance.randint(1, 40),
            temperature=self.chance.choice(self.temperatures),
            top_p=self.chance.choice((0.0, 0.0, 0.9)),
            return_log_probs=True,
            seed=self.chance.choice((None, 3)),
        )
        priority = self.chance.choice((0, 0, 1))
        count = self.chance.choice((1, 1, 3))
        self.expected |= {*self.engine.add_group(prompt, [params] * count, priority=priority)}
        self.tally["requests"] += count

    def abort(self) -> None:
        if unfinished := self.unfinished():
            self.take([self.engine.abort_request(self.chance.choice(unfinished))])
            self.tally["aborts"] += 1

    def steps(self) -> None:
        for _ in range(self.chance.randint(1, 12)):
            if self.engine.state is EngineState.RUNNING:
                self.step()

    def step(self) -> None:
        self.take(self.engine.step())
        self.tally["steps"] += 1

    def suspend(self) -> None:
        self.to_paused()
        mode = self.chance.choice(("persist", "recompute"))
        report = self.engine.suspend(mode)
        self.tally[f"suspends {mode}"] += 1
        self.tally["requests requeued by suspends"] += report.num_requests_requeued
        if self.chance.random() < 0.5:
            self.update()
        self.engine.resume()

    def update(self) -> None:
        model = self.chance.randrange(NUM_MODELS)
        self.push(vllm_weights(model, self.family), (model, None), "updates")

    def adapt(self) -> None:
        base, _ = self.models[self.engine.weights_version]
        adapter = self.chance.randrange(NUM_ADAPTERS)
        self.push(vllm_adapter(adapter), (base, adapter), "adapters")

    def push(self, update: Any, model: tuple[int, int | None], kind: str) -> None:
        version = self.engine.weights_version + 1
        in_flight = self.engine.state is EngineState.RUNNING
        self.engine.update_weights(update, version, in_flight=in_flight)
        self.models[version] = model
        self.tally[f"{kind} in flight" if in_flight else kind] += 1

    def bad_update(self) -> None:
        weights, before = vllm_weights(1, self.family), self.engine.weights_checksum()
        name = self.chance.choice(sorted(weights))
        if self.chance.random() < 0.5:
            del weights[name]
        else:
            weights[name][..., 0] = float("nan")
        with pytest.raises(WeightUpdateError, match=name):
            self.engine.update_weights(weights, in_flight=True)
        assert self.engine.weights_checksum() == before
        self.tally["refused updates"] += 1

    def bad_adapter(self) -> None:
        adapter, before = vllm_adapter(0), self.engine.weights_checksum()
        name = self.chance.choice(sorted(adapter.tensors))
        tensors = dict(adapter.tensors)
        if self.chance.random() < 0.5:
            del tensors[name]
        else:
            tensors[name] = tensors[name] * float("nan")
        with pytest.raises(WeightUpdateError, match=name.rpartition(".lora_")[0]):
            self.engine.update_weights(replace(adapter, tensors=tensors), in_flight=True)
        assert self.engine.weights_checksum() == before
        self.tally["refused adapters"] += 1

    def pause(self) -> None:
        self.to_paused()

    def unpause(self) -> None:
        self.to_running()

    def move_away(self) -> None:
        if unfinished := self.unfinished():
            request_id = self.chance.choice(unfinished)
            record = self.engine.get_record(request_id)
            self.away.append(msgpack.packb(record.serialize()))
            self.engine.abort_request(request_id)
            self.tally["records moved"] += 1

    def come_back(self) -> None:
        if self.away:
            packed = self.away.pop(self.chance.randrange(len(self.away)))
            encoded = msgpack.unpackb(packed, strict_map_key=False)
            self.engine.add_record(DynamicInferenceRequestRecord.deserialize(encoded))

    # ---- helpers

    def unfinished(self) -> list[int]:
        return [i for i in self.engine.request_ids() if not self.engine._outputs.has_ended(i)]

    def to_paused(self) -> None:
        if self.engine.state is EngineState.RUNNING:
            self.engine.pause()

    def to_running(self) -> None:
        if self.engine.state is EngineState.PAUSED:
            self.engine.unpause()

    def take(self, records: list[DynamicInferenceRequestRecord]) -> None:
        for record in records:
            self.returned.append(record.request_id)
            self.replay.check(record)
            for segment in record.requests:
                ages = self._ages(segment)
                self.worst_age = max(self.worst_age, *ages, 0)
        assert self.max_age is None or self.worst_age <= self.max_age

    def _ages(self, segment: Any) -> list[int]:
        """Return the age of the oldest KV under each token, when it was sampled."""
        policy, kv = segment.policy_spans.to_array(), segment.kv_spans.to_array()
        first = len(segment.prompt_tokens)
        ends = range(first, first + segment.num_generated_tokens)
        return [int(policy[p] - kv[:p].min()) for p in ends]


OPERATIONS = (
    *[Schedules.add, Schedules.steps] * 3,
    *(Schedules.abort, Schedules.suspend, Schedules.update, Schedules.update),
    *(Schedules.bad_update, Schedules.pause, Schedules.unpause, Schedules.unpause),
    *(Schedules.move_away, Schedules.come_back),
)
ADAPTERS = (Schedules.adapt, Schedules.adapt, Schedules.bad_adapter)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ENGINES)
def test_every_token_is_what_its_record_says(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dict(ENGINES[name])
    options = {"enable_lora": True, **config.pop("engine_options", {})}
    if options.get("async_scheduling"):
        allow_async_scheduling(monkeypatch)
    engine = vllm_engine(**config, engine_options=options)
    chance = random.Random(run_seed())
    has_batch_queue = engine.core.batch_queue is not None
    schedules = Schedules(engine, chance, config.get("max_kv_staleness_versions"))
    if "speculative_config" in options:
        schedules.temperatures = (0.0,)
    try:
        for _ in range(NUM_SCHEDULES):
            schedules.run()
    finally:
        engine.shutdown()
        # vLLM's build for CPUs starts no further engine in a process that has imported llvmlite,
        # which drafts by n-grams do.
        for module in [each for each in sys.modules if each.startswith("llvmlite")]:
            del sys.modules[module]
    replay, stats = schedules.replay, engine.stats()
    with capsys.disabled():
        print(
            f"\n{name}: {replay.num_tokens} tokens, {replay.num_mixed} over KV of several versions,"
            f" worst gap {replay.worst_gap:.1e}, oldest KV {schedules.worst_age} versions, "
            f"{stats.num_evictions} preemptions, {dict(sorted(schedules.tally.items()))}"
        )
    assert replay.num_tokens > 100
    assert replay.worst_gap <= WORST_GAP
    assert has_batch_queue == (name == "async")
    if name == "drafts":
        # Each decoded token is sampled, and prompts end in a sampled token: the rest are drafts.
        assert stats.num_decode_tokens > stats.num_sampled_tokens
    if IS_LONG:
        assert replay.num_mixed
        assert stats.num_evictions or "num_blocks" not in config
