"""EngineMachine: random operations on a small real engine, compared with the oracle after each."""

from __future__ import annotations

import sys
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

import msgpack
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rollout import EngineState, EngineStateError, SamplingParams, WeightUpdateError
from rollout.requests.record import DynamicInferenceRequestRecord
from tests.engine.faulty_backend import failing_steps
from tests.engine.known_request import Known, check_document
from tests.engine.oracle import Oracle
from tests.engine.random_engines import (
    BOS,
    MODES,
    NUM_MODELS,
    SHARED_TEXT,
    Letters,
    configs,
    rules_of,
    sampling_params,
    tokens,
    weights,
)
from tests.engine.trace import trace_decisions
from tests.tiny_models import pool_gb, tiny_engine


def in_state(*states: EngineState) -> Any:
    return precondition(lambda machine: machine.engine.state in states)


PHASES = ("prefilling", "paused", "waiting", "running")


def phase_of(known: Known) -> str:
    is_prefilling = known.phase == "running" and not known.in_context
    return "prefilling" if is_prefilling else known.phase


class EngineMachine(RuleBasedStateMachine):
    """A state machine of engine operations. After each one all documents equal the oracle's."""

    tally: ClassVar[Counter[str]] = Counter()
    exceptions: ClassVar[list[str]] = []

    @initialize(
        config=configs(),
        version=st.integers(0, 2),
        first=st.lists(sampling_params(), min_size=1, max_size=3),
    )
    def make(self, config: dict[str, Any], version: int, first: list[SamplingParams]) -> None:
        sizes, model = dict(config), deepcopy(weights(0)[0])
        self.tokenizer: Letters | None = config["tokenizer"]
        num_paused = sizes.pop("num_paused_blocks")
        if num_paused is not None:
            block_size = sizes["block_size_tokens"]
            sizes["paused_buffer_size_gb"] = pool_gb(model, num_paused, block_size)
        self.fault: str | None = None
        self.engine = tiny_engine(
            model,
            weights_version=version,
            change_backend=failing_steps(lambda: self.fault),
            **sizes,
        )
        self.decisions = trace_decisions(self.engine)
        self.oracle = Oracle(rules_of(config), {version: weights(0)[1]}, version, self.tally)
        self.default_mode = config["kv_cache_management_mode"]
        self.released: tuple[str, ...] = ()
        self.lacks_weights = False
        self.kv_mode: str | None = None  # of the suspend that took the KV away
        self.returned_ids: set[int] = set()
        self.away: list[tuple[bytes, Known]] = []
        self.tally["schedules"] += 1
        self._add(SHARED_TEXT[:10], first)

    # ---- requests

    @rule(
        num_shared=st.integers(0, len(SHARED_TEXT)),
        tail=st.lists(tokens, max_size=6),
        samples=st.lists(sampling_params(), min_size=1, max_size=4),
        priority=st.sampled_from((0, 0, 0, 1, -1)),
        form=st.sampled_from(("ids", "ids", "text", "text behind BOS")),
    )
    def add(
        self,
        num_shared: int,
        tail: list[int],
        samples: list[SamplingParams],
        priority: int,
        form: str,
    ) -> None:
        self._add(SHARED_TEXT[:num_shared] + tail or [0], samples, priority, form)

    @rule(
        choice=st.integers(0, 99),
        tail=st.lists(tokens, max_size=3),
        samples=st.lists(sampling_params(), min_size=1, max_size=2),
    )
    def add_continuation(self, choice: int, tail: list[int], samples: list[SamplingParams]) -> None:
        """Add a prompt that continues another request's tokens."""
        if self.oracle.known:
            text = self.oracle.known[choice % len(self.oracle.known)].tokens
            self._add(text[: 10 + choice // 10] + tail, samples)

    def _add(
        self,
        prompt: list[int],
        samples: list[SamplingParams],
        priority: int = 0,
        form: str = "ids",
    ) -> None:
        given: list[int] | str = prompt
        if self.tokenizer is None:
            samples = [replace(params, stop_words=None) for params in samples]
        elif form != "ids":
            given = self.tokenizer.decode(prompt)
            self.tally["text prompts"] += 1
            if form == "text behind BOS":
                if prompt[0] != BOS:  # a text that begins with BOS gets no second one
                    prompt = [BOS, *prompt]
                samples = [replace(params, add_BOS=True) for params in samples]
        samples = [
            replace(params, num_tokens_total=None)
            if (params.num_tokens_total or len(prompt) + 1) <= len(prompt)
            else params
            for params in samples
        ]
        ids = self.engine.add_group(given, samples, priority=priority)
        for request_id, params in zip(ids, samples, strict=True):
            self.oracle.add(request_id, prompt, params, priority)

    @rule(
        choice=st.integers(0, 20),
        wanted=st.sampled_from(PHASES),
    )
    def abort(self, choice: int, wanted: str) -> None:
        """Abort a request in the wanted phase, or in any phase if there is none."""
        pending = self._pending()
        if len(pending) > 1:
            inside = [known for known in pending if phase_of(known) == wanted] or pending
            self._abort(inside[choice % len(inside)])

    def _abort(self, known: Known) -> None:
        self.tally[f"aborts {phase_of(known)}, {self.kv_mode or self.engine.state.name}"] += 1
        self.oracle.abort(known)
        self._check(known, self.engine.abort_request(known.request_id))
        self.returned_ids.add(known.request_id)
        if self.kv_mode in ("offload", "recompute"):
            self.oracle.forget_unused(self.engine.scheduler.kv_cache_manager.used_blocks())

    @rule(choice=st.integers(0, 20))
    def move_away(self, choice: int) -> None:
        """Serialize and abort a request, as if it moved to another engine."""
        unfinished = self.oracle.unfinished()
        if len(unfinished) > 1:
            known = unfinished[choice % len(unfinished)]
            record = self.engine.get_record(known.request_id)
            self.away.append((msgpack.packb(record.serialize()), known.copy()))
            self._abort(known)

    @precondition(lambda machine: machine.away)
    @rule(choice=st.integers(0, 20))
    def come_back(self, choice: int) -> None:
        packed, known = self.away.pop(choice % len(self.away))
        encoded = msgpack.unpackb(packed, strict_map_key=False)
        record = DynamicInferenceRequestRecord.deserialize(encoded)
        self.returned_ids.remove(known.request_id)
        assert self.engine.add_record(record) == known.request_id
        self.oracle.add_record(known)
        self.tally["records from elsewhere"] += 1

    # ---- steps

    @in_state(EngineState.RUNNING)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()
            if not self._pending():
                return

    def _step(self) -> None:
        self._take(self.engine.step())

    def _take(
        self, ended_records: list[DynamicInferenceRequestRecord], *, has_failed: bool = False
    ) -> None:
        records = {record.request_id: record for record in ended_records}
        drawn = [] if has_failed else self.oracle.draw(self.decisions[-1])
        for known, logits_V in drawn:
            request_id = known.request_id
            record = records.get(request_id) or self.engine.get_record(request_id)
            self.oracle.take(known, logits_V, record.current.generated_tokens[-1])
        ended = {k.request_id for k in self._pending() if k.is_done}
        assert records.keys() == ended
        for request_id, record in records.items():
            self._check(self.oracle.known[request_id], record)
            self.returned_ids.add(request_id)
        self.tally["steps"] += 1

    @in_state(EngineState.RUNNING)
    @rule(after_writes=st.booleans())
    def fail(self, after_writes: bool) -> None:
        """Let a forward pass raise, before or after it writes its KV."""
        self.fault = "fetch" if after_writes else "launch"
        try:
            records = self.engine.step()
        except RuntimeError:
            self.oracle.abandon(self.decisions[-1], is_raised=True)
            self.tally["failed steps that raise"] += 1
        else:
            has_failed = self.decisions[-1].schedule.plan is not None
            if has_failed:
                self.oracle.abandon(self.decisions[-1], is_raised=False)
                self.tally["failed steps"] += 1
            self._take(records, has_failed=has_failed)
        finally:
            self.fault = None

    # ---- states

    @in_state(EngineState.RUNNING)
    @rule()
    def pause(self) -> None:
        self.engine.pause()

    @in_state(EngineState.PAUSED)
    @rule()
    def unpause(self) -> None:
        if self.lacks_weights:
            with pytest.raises(EngineStateError, match="discarded"):
                self.engine.unpause()
        else:
            self.engine.unpause()

    @in_state(EngineState.PAUSED)
    @rule(
        mode=st.sampled_from(MODES),
        release=st.sampled_from((("kv_cache",), ("kv_cache",), ("kv_cache", "weights"))),
        discards=st.booleans(),
    )
    def suspend(self, mode: str | None, release: tuple[str, ...], discards: bool) -> None:
        discards = discards and "weights" in release
        self.engine.suspend(mode, release, discard_weights=discards)
        self.lacks_weights |= discards
        self.released = release
        mode = mode or self.default_mode
        self.kv_mode = mode
        if mode == "recompute":
            self.oracle.requeue_active()
        if mode != "persist":
            self.oracle.forget_unused(self.engine.scheduler.kv_cache_manager.used_blocks())
        self.tally[f"suspends {mode}"] += 1

    @in_state(EngineState.SUSPENDED)
    @rule(only=st.sampled_from((None, None, "weights", "kv_cache")))
    def resume(self, only: str | None) -> None:
        self.engine.resume(only)
        self.released = tuple(name for name in self.released if only not in (None, name))
        if "kv_cache" not in self.released:
            self.kv_mode = None
        state = EngineState.SUSPENDED if self.released else EngineState.PAUSED
        assert self.engine.state is state

    # ---- weights

    @in_state(EngineState.RUNNING)
    @rule(index=st.integers(1, NUM_MODELS - 1), count=st.integers(1, 4))
    def update_between_steps(self, index: int, count: int) -> None:
        self.step(count)
        self.update(index, 1)
        self.step(count)

    @in_state(EngineState.RUNNING)
    @rule(index=st.integers(1, NUM_MODELS - 1))
    def update_and_ask_again(self, index: int) -> None:
        """Add the same prompt before and after an update."""
        same = SHARED_TEXT, [SamplingParams(num_tokens_to_generate=2, seed=index)]
        self._add(*same)
        self.update_between_steps(index, 2)
        self._add(*same)

    @in_state(EngineState.RUNNING)
    @rule(
        index=st.integers(0, NUM_MODELS - 1), mode=st.sampled_from(MODES), count=st.integers(1, 3)
    )
    def train(self, index: int, mode: str | None, count: int) -> None:
        """Do what a training job does between two phases of generation."""
        self.step(count)
        self.pause()
        self.suspend(mode, ("kv_cache",), discards=False)
        if index:
            self.update(index, 1)
        self.resume(None)
        self.unpause()
        self.step(count)

    @in_state(EngineState.RUNNING)
    @rule(
        mode=st.sampled_from((*MODES, "running")),
        num_steps=st.integers(1, 4),
        wanted=st.sampled_from(PHASES),
    )
    def abort_in_the_midst_and_ask_again(
        self, mode: str | None, num_steps: int, wanted: str
    ) -> None:
        """Abort requests, then add the same prompt: it must not find KV that is lost."""
        same = SHARED_TEXT, [SamplingParams(num_tokens_to_generate=9, seed=num_steps)]
        self._add(*same)
        self._add(SHARED_TEXT[::-1], [SamplingParams(num_tokens_to_generate=12, seed=2)])
        self.step(num_steps)
        if mode != "running":
            self.pause()
            self.suspend(mode, ("kv_cache",), discards=False)
        unfinished = self.oracle.unfinished()
        inside = [known for known in unfinished if phase_of(known) == wanted]
        for known in inside or unfinished[-1:]:
            self._abort(known)
        if mode != "running":
            self.resume(None)
            self.unpause()
        self._add(*same)
        self.step(num_steps)

    @rule(index=st.integers(1, NUM_MODELS - 1), jump=st.integers(1, 3))
    def update(self, index: int, jump: int) -> None:
        model, dense = weights(index)
        version = self.engine.weights_version + jump
        named = dict(model.named_parameters())
        if "weights" in self.released:
            with pytest.raises(EngineStateError, match="released"):
                self.engine.update_weights(named, version)
            return
        in_flight = self.engine.state is EngineState.RUNNING
        report = self.engine.update_weights(named, version, in_flight=in_flight)
        assert report.version == version
        self.lacks_weights = False
        self.oracle.set_version(version, dense)
        self.tally["updates in flight" if in_flight else "updates"] += 1

    @in_state(EngineState.PAUSED, EngineState.SUSPENDED)
    @rule()
    def new_epoch(self) -> None:
        version = self.engine.weights_version + 1
        if self.lacks_weights:
            with pytest.raises(EngineStateError, match="discarded"):
                self.engine.set_generation_epoch(version)
        else:
            self.engine.set_generation_epoch(version)
            self.oracle.set_version(version, None)

    @rule(index=st.integers(1, NUM_MODELS - 1), culprit=st.integers(0, 10))
    def refused_update(self, index: int, culprit: int) -> None:
        named = dict(weights(index)[0].named_parameters())
        name = list(named)[culprit]
        del named[name]
        with pytest.raises((WeightUpdateError, EngineStateError)):
            self.engine.update_weights(named, in_flight=True)

    # ---- what must hold

    def _pending(self) -> list[Known]:
        known = self.oracle.known
        return [known[i] for i in known if i not in self.returned_ids]

    def _check(self, known: Known, record: DynamicInferenceRequestRecord) -> None:
        assert len(record.requests) == known.num_segments
        check_document(known, record.merge(), self.oracle.version, self.tally)

    @invariant()
    def documents_are_the_oracles(self) -> None:
        self.engine.check_integrity(may_be_in_flight=True)
        assert self.engine.weights_version == self.oracle.version
        assert self.engine.has_unfinished_requests() == bool(self._pending())
        for known in self._pending():
            self._check(known, self.engine.get_record(known.request_id))

    def teardown(self) -> None:
        if not hasattr(self, "oracle") or sys.exc_info()[0] is not None:
            return  # something else failed before
        if self.engine.state is EngineState.SUSPENDED:
            self.resume(None)
        if self.engine.state is EngineState.PAUSED:
            if self.lacks_weights:
                self.update(1, 1)
            self.unpause()
        while self.away:
            self.come_back(0)
        num_left = 50 + 3 * sum(known.max_length for known in self.oracle.unfinished())
        while self._pending():
            num_left -= 1
            assert num_left, "starvation"
            self._step()
        stats = self.engine.stats()
        assert stats.num_blocks_used == stats.num_running == stats.num_waiting == 0
        self.exceptions += self.oracle.exceptions
