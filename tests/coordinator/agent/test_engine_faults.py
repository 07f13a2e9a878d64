"""A fault of one request, command or entry affects nothing else: the engine process continues."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollout import SamplingParams
from rollout.backends.forward_batch import ForwardBatch
from rollout.control.commands import Command, Pause, Suspend
from rollout.coordinator.agent.agent import EngineAgent, serve
from rollout.coordinator.net.link import LinkClosedError
from rollout.coordinator.protocol import packed
from rollout.coordinator.protocol.codec import encode
from rollout.coordinator.protocol.messages import (
    Ack,
    AssignRequest,
    Attempt,
    EngineReply,
    Heartbeat,
    Nack,
    Prepare,
    Progress,
    Sample,
)
from rollout.coordinator.protocol.packed import (
    unpack_record,
)
from rollout.errors import ConfigError, ProtocolError, RemoteError
from rollout.weights.source import WeightsSource
from rollout.wire import Message, pack
from tests.coordinator.message_strategies import joined, run_of
from tests.coordinator.scripted_router import register_ack
from tests.tiny_models import prompt_of, tiny_engine, tiny_model

SOURCE = WeightsSource(kind="test", address="here", manifest=b"", checksum="")
MODEL: Any = tiny_model("qwen3", seed=20)


class FaultyEngine:
    """A real engine, but that some of its functions raise the first `num_faults` times."""

    def __init__(
        self,
        num_faults: int = 1000,
        *,
        max_requests: int = 4,
        before_forward: Callable[[ForwardBatch], None] | None = None,
        **faults: Exception,
    ) -> None:
        self._engine = tiny_engine(
            MODEL, num_blocks=64, max_requests=max_requests, before_forward=before_forward
        )
        self._faults = {name: [fault] * num_faults for name, fault in faults.items()}

    def do(self, command: Command[Any]) -> Any:
        return command.run(self)

    def __getattr__(self, name: str) -> Any:
        if not self._faults.get(name):
            return getattr(self._engine, name)

        def fail(*_: Any, **__: Any) -> None:
            raise self._faults[name].pop()

        return fail


class ScriptedLink:
    """A link that returns one message at each `receive`, and is closed after the last one. It
    returns nothing while the agent stages weights. Its clock advances by the waits.
    """

    def __init__(self, *messages: Message, max_frame_bytes: int = 2**20) -> None:
        self._messages, self._max_frame_bytes = list(messages), max_frame_bytes
        self.agent: EngineAgent | None = None
        self.sent: list[Message] = []
        self.timeouts: list[float] = []
        self.num_waits_left = 300
        self.disconnect: dict[str, Any] = {}

    def receive(self, timeout_s: float) -> list[Message]:
        if self.agent is not None and self.agent.is_staging:
            time.sleep(0.001)
            return []
        self.timeouts.append(timeout_s)
        if self._messages:
            return [self._messages.pop(0)]
        self.num_waits_left -= 1
        if not self.num_waits_left:
            raise LinkClosedError("the test is over")
        return []

    def queue(self, message: Message) -> None:
        encode(message, self._max_frame_bytes)
        self.sent.append(message)

    def flush(self) -> None:
        """All is sent."""

    def may_step(self) -> bool:
        return True

    def close(self, reason: str, **more: Any) -> None:
        self.disconnect = {"reason": reason, **more}

    def now(self) -> float:
        return sum(self.timeouts)

    def of(self, message_type: type) -> list[Any]:
        return [m for m in self.sent if isinstance(m, message_type)]


def agent_of(
    engine: Any, link: ScriptedLink | None = None, *, max_requests: int = 4
) -> EngineAgent:
    agent = EngineAgent(
        engine,
        engine_id=bytes(16),
        block_size_tokens=8,
        max_requests=max_requests,
        settings={},
        fetch=lambda _: dict(MODEL.named_parameters()),
        clock=time.monotonic if link is None else link.now,
    )
    if link is not None:
        link.agent = agent
    return agent


def serve_to_the_end(agent: EngineAgent, link: ScriptedLink) -> None:
    """Run `serve` until the script is over."""
    with pytest.raises(LinkClosedError):
        serve(agent, link)  # type: ignore[arg-type]


def assignment(request_id: int, num_tokens: int = 3, **changes: Any) -> AssignRequest:
    """`changes`: of the params, legal or not."""
    params = SamplingParams(num_tokens_to_generate=num_tokens).serialize() | changes
    sample = Sample(request_id=request_id, sampling_params=pack(params), seed=0)
    return AssignRequest(samples=(sample,), prompt_tokens=np.array(prompt_of(5), dtype=np.int32))


# ---- requests


@pytest.mark.parametrize("changes", [{"top_k": 2**63}, {"top_k": 2**31}, {"add_BOS": []}])
def test_params_that_no_engine_can_take_end_their_request_alone(changes: dict[str, Any]) -> None:
    link = ScriptedLink(register_ack(), assignment(0, **changes), assignment(1))
    serve_to_the_end(agent_of(FaultyEngine()), link)
    bad, good = link.of(EngineReply)
    assert (bad.request_id, bad.error.type_name) == (0, "InvalidRequestError")
    assert len(unpack_record(good.record).merge().generated_tokens) == 3


def test_any_fault_of_adding_a_request_is_its_end() -> None:
    engine = FaultyEngine(1, add_group=TypeError("unhashable"))
    link = ScriptedLink(register_ack(), assignment(0), assignment(1))
    serve_to_the_end(agent_of(engine), link)
    bad, good = link.of(EngineReply)
    assert (bad.request_id, bad.is_failed) == (0, True)
    assert bad.error.to_error().message == "unhashable"
    assert not good.is_failed


def failing_at(*lengths: int, max_requests: int = 4) -> FaultyEngine:
    """Its forward passes raise while a context has one of these lengths; without any, always.

    The steps without requests, which show whether the device is at fault, have contexts of 1.
    """

    def fail(batch: ForwardBatch) -> None:
        if not lengths or not {*lengths}.isdisjoint(batch.context_lens.tolist()):
            raise ArithmeticError("this forward pass cannot be done")

    return FaultyEngine(max_requests=max_requests, before_forward=fail)


def test_a_request_that_fails_every_step_fails_and_the_engine_continues() -> None:
    agent = agent_of(failing_at(6))
    link = ScriptedLink(register_ack(), assignment(0, 1), assignment(1, 3), assignment(2, 1))
    serve_to_the_end(agent, link)
    replies = {
        reply.request_id: unpack_record(reply.record).merge() for reply in link.of(EngineReply)
    }
    assert [(i, replies[i].finish_reason) for i in (0, 1, 2)] == [
        (0, "length"),
        (1, "error"),
        (2, "length"),
    ]
    (error,) = [e.payload for e in replies[1].events if e.type.name == "ERROR_NONTRANSIENT"]
    assert str(error) == "ArithmeticError: this forward pass cannot be done"


def test_a_device_that_fails_every_step_ends_the_engine_and_no_request() -> None:
    link = ScriptedLink(register_ack(), assignment(0), assignment(1))
    with pytest.raises(ArithmeticError, match="cannot be done"):
        serve(agent_of(failing_at()), link)  # type: ignore[arg-type]
    assert not link.of(EngineReply)


def test_the_disconnect_of_a_failed_engine_names_running_requests_only() -> None:
    engine = failing_at(1, 7, max_requests=2)
    assigned = [assignment(index) for index in range(4)]
    # All are there before the first step: two of them have rows.
    agent = agent_of(engine)
    for message in (register_ack(), *assigned):
        agent.handle(message)
    link = ScriptedLink()
    with pytest.raises(ArithmeticError, match="cannot be done"):
        serve(agent, link)  # type: ignore[arg-type]
    assert link.disconnect["is_fault"]
    assert [a.request_id for a in link.disconnect["suspects"]] == [0, 1]


def test_the_disconnect_of_an_engine_whose_scheduling_fails_names_the_running_ones() -> None:
    agent = agent_of(engine := FaultyEngine(max_requests=2))
    for message in (register_ack(), *(assignment(index) for index in range(4))):
        agent.handle(message)
    agent.step()

    def fail(*_: Any) -> None:
        raise LookupError("no such block")

    engine.scheduler.schedule = fail
    link = ScriptedLink()
    with pytest.raises(LookupError, match="no such block"):
        serve(agent, link)  # type: ignore[arg-type]
    assert [a.request_id for a in link.disconnect["suspects"]] == [0, 1]


def test_an_end_that_no_frame_can_carry_is_answered_as_failed_and_kept() -> None:
    agent = agent_of(FaultyEngine())
    link = ScriptedLink(*(register_ack(), assignment(0, 200), assignment(1)), max_frame_bytes=4000)
    serve_to_the_end(agent, link)
    replies = {reply.request_id: reply for reply in link.of(EngineReply)}
    assert not replies[1].is_failed
    assert replies[0].is_failed
    with pytest.raises(ProtocolError, match="bytes, at most 4000"):
        raise replies[0].error.to_error()
    assert agent.handle(assignment(0))[0] == replies[0]


def test_progress_that_no_frame_can_carry_ends_its_request_alone() -> None:
    agent = agent_of(FaultyEngine())
    entry = register_ack(report_interval_tokens=150)
    link = ScriptedLink(entry, assignment(0, 200), assignment(1), max_frame_bytes=2500)
    serve_to_the_end(agent, link)
    assert [(r.request_id, r.is_failed) for r in link.of(EngineReply)] == [(1, False), (0, True)]
    assert not agent.has_work


def test_progress_of_many_that_no_frame_can_carry_is_sent_as_two() -> None:
    agent = agent_of(FaultyEngine())
    runs = joined([run_of(length) for length in (3, 1, 2)])
    halves = agent.instead_of(Progress(runs=runs), ProtocolError("too long"))
    assert [len(half.runs) for half in halves] == [1, 2]  # type: ignore[attr-defined]
    reported = [part for half in halves for part in half.runs.apart()]  # type: ignore[attr-defined]
    assert reported == list(runs.apart())


def test_a_record_that_is_too_large_to_read_is_reported_as_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed, "MAX_RECORD_PLAIN_BYTES", 10)
    agent = agent_of(FaultyEngine())
    serve_to_the_end(agent, link := ScriptedLink(register_ack(), assignment(0)))
    (reply,) = link.of(EngineReply)
    assert reply.is_failed
    with pytest.raises(ProtocolError, match="bytes of plain values"):
        raise reply.error.to_error()


# ---- commands


def test_any_fault_while_staging_is_the_vote_no() -> None:
    engine = FaultyEngine(1, stage_weights=MemoryError("no room for a copy"))
    prepares = [
        Prepare(command_id=i, version=5, source=SOURCE, in_flight=True, deadline_s=1.0)
        for i in (1, 2)
    ]
    link = ScriptedLink(register_ack(), *prepares, assignment(0))
    serve_to_the_end(agent_of(engine, link), link)
    (vote,) = link.of(Nack)
    error = vote.error.to_error()
    assert isinstance(error, RemoteError)
    assert str(error) == "MemoryError: no room for a copy"
    assert [ack.command_id for ack in link.of(Ack)] == [2]
    assert len(link.of(EngineReply)) == 1


# ---- entering


def test_an_entry_that_fails_is_tried_again_and_nothing_runs_before() -> None:
    engine = FaultyEngine(3, pause=RuntimeError("out of memory"))
    entry = register_ack(weights_version=4, weights=SOURCE, keep=(Attempt(request_id=0),))
    link = ScriptedLink(assignment(0), entry)
    serve_to_the_end(agent_of(engine, link), link)
    (beat,) = link.of(Heartbeat)
    assert beat.status.weights_version == 4
    (reply,) = link.of(EngineReply)
    assert unpack_record(reply.record).merge().policy_versions.tolist() == [0, 4, 4]
    assert link.timeouts[1:5] == [0.0, 0.5, 0.5, 0.5], "it waits between two tries"


def test_an_entry_that_never_succeeds_ends_the_engine() -> None:
    engine = FaultyEngine(pause=RuntimeError("the device is gone"))
    link = ScriptedLink(register_ack(state="PAUSED"))
    with pytest.raises(RuntimeError, match="the device is gone"):
        serve(agent_of(engine, link), link)  # type: ignore[arg-type]
    assert link.sent == []


@pytest.mark.parametrize("text", ["no such file: a\udcff", "x" * 2**21])
def test_a_command_error_that_no_frame_can_carry_is_shortened(text: str) -> None:
    link = ScriptedLink(register_ack(), Pause(command_id=1), Pause(command_id=2))
    serve_to_the_end(agent_of(FaultyEngine(1, pause=OSError(text)), link), link)
    (refusal,) = link.of(Nack)
    assert str(refusal.error.to_error())[:20] == f"OSError: {text}"[:20]
    assert [ack.command_id for ack in link.of(Ack)] == [2]


@pytest.mark.parametrize("report", ["a\udcff", "x" * 2**20, 2**64])
def test_a_command_whose_report_no_frame_can_carry_is_refused(report: Any) -> None:
    engine = FaultyEngine()
    engine.do = lambda command: {"report": report}  # type: ignore[method-assign]
    link = ScriptedLink(register_ack(), Pause(command_id=1), assignment(0))
    serve_to_the_end(agent_of(engine), link)
    (refusal,) = link.of(Nack)
    assert refusal.command_id == 1
    assert isinstance(refusal.error.to_error(), ProtocolError)
    assert len(link.of(EngineReply)) == 1, "the engine goes on"


def test_an_engine_of_more_requests_than_a_registration_names_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_requests=65537 .* at most 65536"):
        agent_of(FaultyEngine(), max_requests=2**16 + 1)


def test_a_command_after_a_failed_one_is_done() -> None:
    engine = FaultyEngine(1, suspend=RuntimeError("the arena is broken"))
    commands = [kind(command_id=i) for i, kind in enumerate([Pause, Suspend, Suspend])]
    link = ScriptedLink(register_ack(), *commands)
    serve_to_the_end(agent_of(engine), link)
    assert [nack.command_id for nack in link.of(Nack)] == [1]
    assert [ack.command_id for ack in link.of(Ack)] == [0, 2]
