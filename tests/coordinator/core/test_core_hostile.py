"""The core survives any frames of its peers, and honest requests complete."""

from __future__ import annotations

import random

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.control.commands import Pause
from rollout.coordinator.protocol.codec import encode
from rollout.coordinator.protocol.messages import Connect, EngineReply, Register
from rollout.wire import Message
from tests.coordinator.fake_fleet import LIMITS, FakeFleet
from tests.coordinator.message_strategies import (
    FROM_CLIENTS,
    FROM_ENGINES,
    FROM_UNKNOWN_PEERS,
    TYPES,
    messages,
)
from tests.coordinator.protocol.test_message_fields import EXAMPLES
from tests.run_kind import scaled


def any_of(types: set[type[Message]]) -> st.SearchStrategy[Message]:
    return st.sampled_from(sorted(types, key=lambda cls: cls.__name__)).flatmap(messages)


from_clients, from_engines = any_of(FROM_CLIENTS), any_of(FROM_ENGINES)
quick = settings(
    max_examples=scaled(60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@quick
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.one_of(from_clients, from_engines, messages())),
        max_size=60,
    ),
    st.sampled_from([0.1, 5.0, 40.0]),
)
def test_any_messages_from_any_peers_are_survived(
    said: list[tuple[int, Message]], pause_s: float
) -> None:
    fleet = FakeFleet(block_size_tokens=2)
    peers = [fleet.client(), fleet.client(), fleet.engine(), fleet.engine()]
    fleet.run()
    for number, message in said:
        outgoing = fleet.core.handle(peers[number].identity, message, fleet.now)
        for _, sent in outgoing:
            encode(sent)
        fleet.now += pause_s
        for _, sent in fleet.core.tick(fleet.now):
            encode(sent)
    for _, sent in fleet.core.close("the end"):
        encode(sent)
    requests = fleet.part("RequestTable").requests.values()
    assert all(request.reply is not None for request in requests)


@quick
@given(st.lists(from_clients, max_size=60), st.randoms(use_true_random=False))
def test_honest_traffic_completes_beside_hostile_clients_and_unknown_peers(
    said: list[Message], chance: random.Random
) -> None:
    fleet = FakeFleet()
    honest, hostile, _ = fleet.client(), fleet.client(), fleet.engine()
    fleet.run()
    fleet.send(honest, honest.submission([4, 6], streaming=True))
    fleet.run()
    hushed = (Connect, Register)
    for message in said:
        mutated = bytearray(encode(message))
        mutated[chance.randrange(len(mutated))] ^= 1 << chance.randrange(8)
        fleet.core.handle(hostile.identity, bytes(mutated), fleet.now)
        if not isinstance(message, hushed):
            fleet.core.handle(b"unknown", message, fleet.now)
            fleet.core.handle(b"unknown", bytes(mutated[1:]), fleet.now)
    fleet.finish()
    assert [len(asked.replies) for asked in honest.asked.values()] == [1, 1]


def test_tables_stay_bounded_under_a_flood_of_unknown_peers_and_faults() -> None:
    fleet = FakeFleet()
    for number in range(5 * LIMITS.max_noted_peers):
        identity = b"%d" % number
        fleet.core.handle(identity, b"\xc1", fleet.now)
        fleet.core.handle(identity, EngineReply(request_id=1, record=b""), fleet.now)
    assert [len(noted) for noted in fleet.parts["Recent"]] == [LIMITS.max_noted_peers] * 2
    assert fleet.core.counters.num_malformed == 5 * LIMITS.max_noted_peers


def test_an_unknown_peer_is_answered_once_per_heartbeat_interval() -> None:
    fleet, message = FakeFleet(), EngineReply(request_id=1, record=b"")
    num_answers = []
    for seconds in (0, 0.1, 0.1, 1.0, 0.1):
        fleet.now += seconds * LIMITS.heartbeat_s
        num_answers.append(len(fleet.core.handle(b"unknown", message, fleet.now)))
    assert num_answers == [1, 0, 0, 1, 0]


@pytest.mark.parametrize("kind", TYPES)
def test_the_core_handles_only_messages_that_the_peer_may_send(
    kind: type[Message], caplog: pytest.LogCaptureFixture
) -> None:
    examples = {type(example): example for example in EXAMPLES}
    message = examples[kind] if kind in examples else kind(command_id=1)  # a command
    for role, allowed in (("client", FROM_CLIENTS), ("engine", FROM_ENGINES)):
        fleet = FakeFleet()
        peer = getattr(fleet, role)()
        fleet.run()
        caplog.clear()
        fleet.core.handle(peer.identity, message, fleet.now)
        assert ("which it may not" in caplog.text) == (kind not in allowed)


@quick
@given(messages())
def test_the_core_handles_only_handshakes_of_unknown_peers(message: Message) -> None:
    fleet = FakeFleet()
    fleet.core.handle(b"unknown", message, fleet.now)
    assert fleet.core.counters.num_unknown_peers == (type(message) not in FROM_UNKNOWN_PEERS)


def test_a_malformed_request_or_command_of_a_client_is_answered_with_the_fault() -> None:
    fleet = FakeFleet()
    client, _ = fleet.client(), fleet.engine()
    fleet.run()
    fleet.route(fleet.core.handle(client.identity, client.submission([4]), fleet.now))
    (known_id,) = client.asked
    streams = msgpack.packb([20, [[known_id, 0, b""], [900, 0, b""]], b"", 0, None, 3])
    sent = fleet.core.handle(client.identity, streams, fleet.now)
    assert [(type(m), m.request_id) for _, m in sent] == [(EngineReply, 900)], "known ones go on"
    assert "SubmitRequest.streaming" in str(sent[0][1].error.message)
    paused = msgpack.packb([40, 7, -5])
    ((identity, refusal),) = fleet.core.handle(client.identity, paused, fleet.now)
    assert (identity, refusal.command_id) == (client.identity, 7)
    assert fleet.core.handle(b"unknown", paused, fleet.now) == []
    assert fleet.core.counters.num_malformed == 3
    fleet.finish()
    assert [len(asked.replies) for asked in client.asked.values()] == [1]


def test_a_malformed_reply_or_answer_of_an_engine_ends_the_request_or_command() -> None:
    fleet = FakeFleet()
    client, engine = fleet.client(), fleet.engine()
    fleet.run()
    fleet.send(client, client.submission([4]))
    fleet.run()
    (request,) = fleet.part("RequestTable").requests.values()
    broken = msgpack.packb([21, request.server_id, request.attempt, 5])
    sent = fleet.core.handle(engine.identity, broken, fleet.now)
    (reply,) = [m for identity, m in sent if identity == client.identity]
    assert reply.is_failed
    assert "EngineReply.record" in str(reply.error.message)
    pause = Pause(command_id=3)
    ((_, asked),) = fleet.core.handle(client.identity, pause, fleet.now)[-1:]
    broken = msgpack.packb([70, asked.command_id, 5])
    sent = fleet.core.handle(engine.identity, broken, fleet.now)
    (answer,) = [m for identity, m in sent if identity == client.identity]
    assert (answer.command_id, fleet.core.state.name) == (3, "RUNNING")
    assert "Ack.result" in str(answer.error.message)
