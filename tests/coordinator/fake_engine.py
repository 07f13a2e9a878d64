"""FakeEngine: an engine without a model, which answers at once. For FakeFleet.

Token k of a request is a pure function of its seed and k.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from rollout.control.commands import (
    ChecksumWeights,
    Command,
    SetGenerationEpoch,
    Shutdown,
    Stats,
    Suspend,
)
from rollout.control.state import EngineState
from rollout.coordinator.core.context import num_ahead
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    Ack,
    AssignRequest,
    Attempt,
    Commit,
    Credit,
    EngineReply,
    EngineStatus,
    Heartbeat,
    Nack,
    Prepare,
    Progress,
    Register,
    RegisterAck,
    ReplyAck,
    Rollback,
    Sample,
    nack_of,
)
from rollout.coordinator.protocol.packed import (
    unpack_params,
)
from rollout.errors import EngineStateError, WeightUpdateError
from rollout.requests.token_runs import TokenRun
from rollout.weights.source import WeightsSource
from rollout.wire import Message, pack
from tests.coordinator.message_strategies import joined


def token_at(seed: int, position: int) -> int:
    """Token `position` of the request with this seed."""
    return (seed * 7919 + position * 104729 + 13) % 50000


def tokens_of(seed: int, start: int, end: int) -> list[int]:
    return [token_at(seed, position) for position in range(start, end)]


def token_run(seed: int, start: int, end: int, version: int = 0) -> TokenRun:
    versions = np.full(end - start, version, np.int32)
    return TokenRun(
        offset=start,
        entry_version=0,
        token_ids=np.array(tokens_of(seed, start, end), np.int32),
        policy_versions=versions,
        context_kv_version_min=versions,
        context_kv_version_mean=versions.astype(np.float64),
    )


def source_of(version: int) -> WeightsSource:
    return WeightsSource(kind="fake", address=str(version), manifest=b"", checksum=f"sum{version}")


def progress_of(request_id: int, attempt: int, run: TokenRun) -> Progress:
    """Return the Progress of one attempt."""
    names = {"request_ids": np.array([request_id]), "attempts": np.array([attempt])}
    return Progress(runs=replace(joined([run]), **names))


@dataclass
class Held:
    """An attempt at an engine."""

    attempt: int
    seed: int
    num_tokens: int
    num_total: int
    num_reported: int


@dataclass
class FakeEngine:
    """Executes messages. `refuses`: names of message types that it answers with Nack; `ignores`:
    names of types that it does not answer."""

    identity: bytes
    engine_id: bytes
    state: str = "RUNNING"
    version: int = 0
    checksum: str = "sum0"
    refuses: set[str] = field(default_factory=set)
    ignores: set[str] = field(default_factory=set)
    held: dict[int, Held] = field(default_factory=dict)
    ended: dict[int, EngineReply] = field(default_factory=dict)
    prepared: Prepare | None = None
    has_entered: bool = False
    is_in_step: bool = False  # its thread answers nothing, while its link sends heartbeats
    to_answer: list[Message] = field(default_factory=list)  # messages that came during the step
    num_steps: int = 0
    must_register: bool = False
    max_requests: int = 64
    block_size_tokens: int = 2
    settings: dict[str, str] = field(default_factory=dict)
    longest_step_s: float = 0.0  # as it has measured
    num_waiting: int = 0  # as it says: all it holds make a token in each step
    num_received: int = 0
    num_granted: int = 0
    session: int = 0
    seen: list[Message] = field(default_factory=list)

    def registration(self) -> Register:
        running = [
            Attempt(request_id=i, attempt=each.attempt)
            for i, each in [*self.held.items(), *self.ended.items()]
        ]
        return Register(
            engine_id=self.engine_id,
            state=self.state,
            weights_version=self.version,
            weights_checksum=self.checksum,
            block_size_tokens=self.block_size_tokens,
            max_requests=self.max_requests,
            running=tuple(running),
            prepared_command_id=None if self.prepared is None else self.prepared.command_id,
            settings=self.settings,
        )

    def heartbeat(self) -> Heartbeat:
        status = EngineStatus(
            state=self.state,
            num_steps=self.num_steps,
            num_waiting=self.num_waiting,
            num_running=len(self.held),
            weights_version=self.version,
            longest_step_s=self.longest_step_s,
        )
        return Heartbeat(sequence=self.num_steps, status=status)

    def step(self, num_tokens: int = 2) -> list[Message]:
        """Generate for all attempts; progress first, then ends, whose last tokens are in no
        progress."""
        if self.state != "RUNNING" or self.must_register or self.prepared is not None:
            return []
        self.num_steps += 1
        out: list[Message] = []
        for request_id, held in list(self.held.items()):
            held.num_tokens = min(held.num_tokens + num_tokens, held.num_total)
            if held.num_tokens == held.num_total:
                out.append(self._end(request_id))
            else:
                out.append(self.report(request_id, held.num_reported))
                held.num_reported = held.num_tokens
        return [*out, *self.credit()]

    def end_step(self) -> list[Message]:
        """End a step without new tokens; answers the messages that came meanwhile."""
        self.is_in_step, waiting = False, self.to_answer
        self.num_steps, self.to_answer = self.num_steps + 1, []
        return [answer for message in waiting for answer in self.receive(message)]

    def credit(self) -> list[Message]:
        """Return a Credit if the engine accepts more requests than it has granted."""
        ahead = num_ahead(self.max_requests)
        room = min(ahead - self.num_waiting, self.max_requests + ahead - len(self.held))
        if self.num_received + max(0, room) <= self.num_granted:
            return []
        self.num_granted = self.num_received + room
        return [Credit(num_granted=self.num_granted, session=self.session)]

    def report(self, request_id: int, start: int) -> Progress:
        held = self.held[request_id]
        run = token_run(held.seed, min(start, held.num_tokens), held.num_tokens, self.version)
        return progress_of(request_id, held.attempt, run)

    def _end(self, request_id: int, *, is_aborted: bool = False) -> EngineReply:
        held = self.held.pop(request_id)
        self.ended[request_id] = EngineReply(
            request_id=request_id,
            attempt=held.attempt,
            record=pack(tokens_of(held.seed, 0, held.num_tokens)),
            is_failed=is_aborted,
        )
        return self.ended[request_id]

    def receive(self, message: Message) -> list[Message]:
        self.seen.append(message)
        if isinstance(message, Heartbeat):
            return []  # a link handles heartbeats itself
        if self.is_in_step:
            self.to_answer.append(message)
            return []
        answers = self._answers(message)
        return answers if self.must_register else [*answers, *self.credit()]

    def _answers(self, message: Message) -> list[Message]:
        if isinstance(message, Nack):
            self.must_register = True
            return []
        if isinstance(message, RegisterAck):
            return self._enter(message)
        if isinstance(message, AssignRequest):
            return [reply for sample in message.samples for reply in self._assign(sample)]
        if isinstance(message, ReplyAck):
            for a in message.attempts:
                if a.request_id in self.ended and self.ended[a.request_id].attempt == a.attempt:
                    del self.ended[a.request_id]
        if isinstance(message, AbortRequest):
            named = {a.request_id: a.attempt for a in message.attempts}
            here = [i for i, h in self.held.items() if named.get(i) == h.attempt]
            return [self._end(i, is_aborted=True) for i in here]
        if isinstance(message, (Command, Prepare, Commit, Rollback)):
            return self._answer(message)
        return []

    def _assign(self, sample: Sample) -> list[EngineReply]:
        held = self.held.get(sample.request_id)
        assert held is None or held.attempt <= sample.attempt, "attempts go backwards"
        seed, run = sample.seed, sample.resumed
        assert seed is not None
        num_known = 0 if run is None else len(run)
        if run is not None:
            assert run.token_ids.tolist() == tokens_of(seed, 0, num_known), "resumed others' tokens"
        total = unpack_params(sample.sampling_params).num_tokens_to_generate
        assert total is not None
        self.num_received += 1
        self.held[sample.request_id] = Held(sample.attempt, seed, num_known, total, num_known)
        self.ended.pop(sample.request_id, None)
        return []

    def _enter(self, message: RegisterAck) -> list[Message]:
        self.has_entered, self.must_register = True, False
        self.num_received, self.num_granted, self.session = 0, 0, message.session
        kept = {a.request_id: a.attempt for a in message.keep}
        self.held = {i: h for i, h in self.held.items() if kept.get(i) == h.attempt}
        self.ended = {i: r for i, r in self.ended.items() if kept.get(i) == r.attempt}
        if message.weights is not None and message.weights_version > self.version:
            self.version, self.checksum = message.weights_version, message.weights.checksum
            self.prepared = None
        self.state = message.state
        return [self.heartbeat(), *self.ended.values()]

    def _answer(self, message: Command[Any] | Prepare | Commit | Rollback) -> list[Message]:
        name = type(message).__name__
        if name in self.ignores:
            return []
        if name in self.refuses:
            return [nack_of(message.command_id, WeightUpdateError(f"{name} refused"))]
        try:
            self._do(message)
        except EngineStateError as error:
            return [nack_of(message.command_id, error)]
        result: dict[str, Any] | None = None
        if isinstance(message, Prepare):
            result = {"checksum": message.source.checksum}
        elif isinstance(message, Suspend):
            result = {"mode": message.mode or "recompute"}
        return [Ack(command_id=message.command_id, result=result), self.heartbeat()]

    def _do(self, message: Command[Any] | Prepare | Commit | Rollback) -> None:
        if isinstance(message, Prepare):
            assert message.version > self.version
            self.prepared = message
        elif isinstance(message, Rollback):
            self.prepared = None
        elif isinstance(message, Commit):
            assert self.prepared is not None
            assert self.prepared.command_id == message.command_id, "committed what was not voted on"
            self.version, self.checksum = message.version, self.prepared.source.checksum
            self.prepared = None
        elif isinstance(message, SetGenerationEpoch):
            if self.state == "RUNNING":
                raise EngineStateError("not while RUNNING")
            self.version = message.version
        elif isinstance(message, Shutdown):
            self.state = "STOPPED"
        elif not isinstance(message, (Stats, ChecksumWeights)):
            transition = message.transition
            if not transition.is_legal_in(EngineState[self.state]):
                raise EngineStateError(f"{message.name} while {self.state}")
            assert transition.target is not None
            self.state = transition.target.name
