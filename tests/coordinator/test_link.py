"""Link against a scripted coordinator: handshake, heartbeats, lease, queued messages."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from rollout.control.commands import COMMANDS, Pause
from rollout.coordinator.net.link import Inbox, Lease, Link, LinkClosedError, Outbox
from rollout.coordinator.net.sockets import DealerSocket, RouterSocket, SelfPipe
from rollout.coordinator.protocol.codec import batched, encode, frames_in
from rollout.coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    Ack,
    AssignRequest,
    Attempt,
    Commit,
    Connect,
    ConnectAck,
    Disconnect,
    EngineReply,
    EngineReplyPartial,
    EngineStatus,
    Heartbeat,
    Nack,
    Prepare,
    Register,
    RegisterAck,
    ReplyAck,
    Rollback,
    nack_of,
)
from rollout.errors import ConfigError, CoordinatorLostError, ProtocolError, RolloutError
from rollout.wire import Message
from tests.coordinator.message_examples import MESSAGES
from tests.coordinator.message_strategies import FROM_COORDINATORS
from tests.coordinator.scripted_router import (
    BOUND_S,
    ScriptedRouter,
    connect_ack,
    polite,
    politely,
    register_ack,
)
from tests.waiting import until

ROOT = Path(__file__).parents[2]


def registration() -> Register:
    return Register(
        protocol_version=PROTOCOL_VERSION,
        engine_id=bytes(16),
        state="RUNNING",
        weights_version=0,
        weights_checksum="",
        block_size_tokens=16,
        max_requests=8,
    )


def status() -> EngineStatus:
    return EngineStatus(
        state="RUNNING",
        num_steps=0,
        num_waiting=0,
        num_running=0,
        weights_version=0,
    )


def link_to(router: ScriptedRouter, **options: object) -> Link:
    return Link(router.port, **{"handshake": registration, "status": status, **options})


def send(link: Link, message: Message) -> None:
    link.queue(message)
    link.flush()


def received(link: Link, num: int = 1) -> list[Message]:
    messages: list[Message] = []
    deadline = time.monotonic() + BOUND_S
    while len(messages) < num:
        assert time.monotonic() < deadline, messages
        messages += link.receive(0.1)
    return messages


def acks(num: int, start: int = 0) -> list[Ack]:
    return [Ack(command_id=i) for i in range(start, start + num)]


PAUSES = [Pause(command_id=i) for i in range(3)]


# ---- registration


def test_may_step_is_true_once_register_ack_is_received():
    with ScriptedRouter() as router, link_to(router) as link:
        assert not link.may_step()
        link.wait_registered(BOUND_S)
        assert not link.may_step()  # what counts no more is not known yet
        assert received(link) == [register_ack()]
        assert link.may_step()
        assert router.received[0] == registration()


def test_an_address_without_a_coordinator_is_named_in_the_error():
    with ScriptedRouter() as router:
        router.vanish()
        with link_to(router) as link:
            with pytest.raises(CoordinatorLostError, match=f"no coordinator.*{router.port}"):
                link.wait_registered(0.2)
            router.come_back()
            assert received(link) == [register_ack()]


def test_a_refusal_is_raised_with_its_class_and_tried_again():
    reason = ProtocolError("the peer speaks protocol 2, this process 1")
    with ScriptedRouter(lambda m: [nack_of(None, reason)]) as router, link_to(router) as link:
        with pytest.raises(ProtocolError, match="speaks protocol 2"):
            link.wait_registered(BOUND_S)
        assert not link.may_step()
        router.script = polite
        received(link)
        link.wait_registered(BOUND_S)
        assert link.may_step()


def test_no_address_is_refused():
    for address in ("nowhere", 0, -1, 70000, True):
        with pytest.raises(ConfigError, match="port"):
            Link(address, handshake=registration, status=status)
    with pytest.raises(ConfigError, match="is not an address"):
        Link("tcp://nowhere", handshake=registration, status=status)


# ---- messages


def test_messages_keep_their_order_both_ways():
    with ScriptedRouter() as router, link_to(router) as link:
        for message in acks(2000):
            send(link, message)
        assert router.wait_for(Ack, 2000) == acks(2000)
        commands = [Pause(command_id=i) for i in range(2000)]
        router.send(*commands)
        assert received(link, 2001)[1:] == commands


def test_receive_waits_for_a_message_and_no_longer():
    with ScriptedRouter() as router, link_to(router) as link:
        received(link)
        start = time.monotonic()
        assert link.receive(0.1) == []
        assert 0.09 < time.monotonic() - start < 5
        threading.Timer(0.1, router.send, [ReplyAck(attempts=())]).start()
        start = time.monotonic()
        assert link.receive(BOUND_S) == [ReplyAck(attempts=())]
        assert time.monotonic() - start < 5


def test_garbage_and_messages_of_others_are_dropped_and_logged_once(caplog):
    with ScriptedRouter() as router, link_to(router) as link:
        received(link)
        with caplog.at_level(logging.WARNING):
            router.send(b"", b"\xff", b"\x91\xcc\xff", connect_ack(), registration())
            router.send_frames(b"\x91\x00", b"")
            router.send(Pause(command_id=7))
            assert received(link) == [Pause(command_id=7)]
        assert link.num_malformed == 6
        assert len([r for r in caplog.records if "malformed frame" in r.message]) == 1
        assert link.may_step()


FOR_CLIENTS = {EngineReply, EngineReplyPartial, Ack, Nack}
FOR_ENGINES = {*COMMANDS, AssignRequest, AbortRequest, ReplyAck}
FOR_ENGINES |= {Prepare, Commit, Rollback}
# What a link takes for itself: the answers to its handshakes and heartbeats, and a Disconnect.
FOR_THE_SESSION = {ConnectAck, RegisterAck, Heartbeat, Disconnect}


def test_every_message_of_a_coordinator_is_for_clients_engines_or_the_session():
    assert FROM_COORDINATORS == FOR_CLIENTS | FOR_ENGINES | FOR_THE_SESSION


@pytest.mark.parametrize(
    ("received_kinds", "options"),
    [
        (FOR_ENGINES, {}),
        (
            FOR_CLIENTS,
            {
                "handshake": lambda: Connect(
                    protocol_version=PROTOCOL_VERSION, client_id=bytes(16)
                ),
                "status": None,
            },
        ),
    ],
    ids=["engine", "client"],
)
def test_link_receives_the_messages_for_its_kind_of_peer_and_refuses_others(
    received_kinds, options
):
    sent = [message for message in MESSAGES if type(message) not in FOR_THE_SESSION]
    with ScriptedRouter() as router, link_to(router, **options) as link:
        received(link)
        router.send(*sent)
        kinds = {type(message) for message in received(link, num=len(received_kinds))}
        assert kinds == received_kinds
        until(
            lambda: link.num_malformed == len(sent) - len(received_kinds), "all others are refused"
        )


def test_a_malformed_message_does_not_hurt_those_that_came_with_it():
    with ScriptedRouter() as router, link_to(router) as link:
        received(link)
        frames = [encode(PAUSES[0]), b"\x93\x28\xff", encode(PAUSES[2]), b"\xc1"]
        ((together, _),) = batched(frames)
        router.send(together, b"\x92\x54\xc0")
        assert received(link, num=2) == [PAUSES[0], PAUSES[2]]
        router.send(b"\x93\x28\x07\xff")  # a PAUSE that names its command
        (failure,) = received(link)
        assert (type(failure), failure.command_id) == (Nack, 7)
        until(lambda: link.num_malformed == 4, "4 malformed messages")


def test_messages_that_are_queued_together_are_one_frame():
    with ScriptedRouter() as router, link_to(router) as link:
        received(link)
        num_before = router.num_frames
        for ack in acks(200):
            link.queue(ack)
        link.flush()
        assert router.wait_for(Ack, num=200) == acks(200)
        assert router.num_frames - num_before < 20, "heartbeats among them"


def test_a_message_that_cannot_be_sent_is_refused_to_the_sender():
    large = ReplyAck(attempts=tuple(Attempt(request_id=i) for i in range(1000)))
    with ScriptedRouter() as router, link_to(router, max_frame_bytes=1000) as link:
        received(link)
        with pytest.raises(ProtocolError, match="at most 1000"):
            send(link, large)


def test_a_full_queue_refuses_the_next_message_and_drops_none():
    with ScriptedRouter() as router:
        router.vanish()
        with link_to(router, max_queued=3) as link:
            for message in acks(3):
                send(link, message)
            with pytest.raises(RolloutError, match="3 messages wait"):
                send(link, Ack(command_id=3))
            router.come_back()
            assert router.wait_for(Ack, 3) == acks(3)


def test_an_engine_stops_making_more_while_half_of_the_queue_waits():
    is_deaf = threading.Event()

    def script(message: Message) -> list[Message] | None:
        return [] if is_deaf.is_set() and isinstance(message, Heartbeat) else None

    # Nothing is known to have arrived while no heartbeat is answered.
    with ScriptedRouter(politely(script)) as router, link_to(router, max_queued=8) as link:
        received(link)
        is_deaf.set()
        for message in acks(4):
            send(link, message)
        assert link.may_step()
        send(link, Ack(command_id=4))
        assert not link.may_step()
        is_deaf.clear()
        until(link.may_step, "the lease is valid")


def test_a_full_inbox_receives_the_rest_once_it_is_emptied():
    commands = [Pause(command_id=i) for i in range(20)]
    with ScriptedRouter() as router, link_to(router, max_queued=4) as link:
        router.wait_for(Register)
        router.send(*commands)
        taken: list[Message] = []
        while len(taken) < 21:
            time.sleep(0.02)
            batch = link.receive(BOUND_S)
            assert 1 <= len(batch) <= 4
            taken += batch
        assert taken[1:] == commands


# ---- heartbeats and the lease


def test_heartbeats_have_the_status_and_continue_while_the_engine_is_blocked():
    with ScriptedRouter() as router, link_to(router) as link:
        received(link)
        ends_at = link._lease.until
        # The engine's thread does nothing at all.
        beats = router.wait_for(Heartbeat, len(router.wait_for(Heartbeat)) + 10)
        until(lambda: link._lease.until > ends_at, "the lease is renewed")
        assert all(beat.status == status() for beat in beats)
        assert [beat.sequence for beat in beats] == list(range(1, len(beats) + 1))


def test_a_coordinator_that_is_silent_for_the_lease_stops_the_engine_until_it_registers():
    silent, lease_s = threading.Event(), 1.0

    def script(message: Message) -> list[Message] | None:
        if silent.is_set():
            return []
        return [register_ack(lease_s=lease_s)] if isinstance(message, Register) else None

    with ScriptedRouter(politely(script)) as router, link_to(router) as link:
        received(link)
        silent.set()
        lease_ends_at = time.monotonic() + lease_s
        asked_at = time.monotonic()
        while link.may_step():
            assert asked_at <= lease_ends_at
            time.sleep(0.005)
            asked_at = time.monotonic()
        router.wait_for(Register, 2)
        router.script = polite
        assert not link.may_step()
        assert received(link) == [register_ack()]
        assert link.may_step()


def test_the_lease_counts_from_when_the_registration_was_sent():
    def late(message: Message) -> list[Message] | None:
        if isinstance(message, Register):
            time.sleep(0.3)
            return [register_ack(lease_s=0.25)]
        return None

    with ScriptedRouter(politely(late)) as router, link_to(router) as link:
        received(link)
        assert not link.may_step()


def test_an_engine_that_is_no_longer_known_stops_at_once_and_registers_again():
    with ScriptedRouter() as router, link_to(router) as link:
        received(link)
        router.script = lambda m: []
        router.send(nack_of(None, ProtocolError("who are you?")))
        until(lambda: not link.may_step(), "the lease ends")
        router.wait_for(Register, 2)
        router.script = polite
        assert received(link) == [register_ack()]
        assert link.may_step()


def test_messages_before_a_disconnect_are_received_before_the_end_of_the_link():
    with ScriptedRouter() as router, link_to(router) as link:
        received(link)
        router.send(ReplyAck(attempts=()), Disconnect(reason="done"))
        assert received(link) == [ReplyAck(attempts=())]
        with pytest.raises(CoordinatorLostError, match="it disconnected: done"):
            link.receive(BOUND_S)
        assert not link.may_step()
        send(link, Ack(command_id=0))  # to nobody


def test_messages_wait_while_the_coordinator_is_away_and_follow_the_registration():
    with ScriptedRouter() as router, link_to(router) as link:
        received(link)
        for round_ in range(3):
            router.vanish()
            router.received.clear()
            for message in acks(5, start=5 * round_):
                send(link, message)
            router.come_back()
            last = Ack(command_id=5 * round_ + 4)
            router.wait_until(lambda last=last: [m for m in router.received if m == last])
            news = [m for m in router.received if not isinstance(m, Heartbeat)]
            assert news[0] == registration()
            assert news[-5:] == acks(5, start=5 * round_)
            assert received(link) == [register_ack()]
            assert link.may_step()


def test_another_coordinator_at_the_address_ends_the_link():
    with ScriptedRouter() as router, link_to(router) as link:
        received(link)
        router.vanish()
        router.received.clear()
        send(link, Ack(command_id=0))
        another = register_ack(coordinator_id=bytes(16))
        router.script = politely(lambda m: [another] if isinstance(m, Register) else None)
        router.come_back()
        with pytest.raises(CoordinatorLostError, match="another coordinator is at its address"):
            link.receive(BOUND_S)
        send(link, Ack(command_id=1))  # to nobody
        assert not link.may_step()
        assert not [m for m in router.received if isinstance(m, Ack)]


def test_an_engine_gives_up_a_coordinator_that_stays_away():
    with ScriptedRouter() as router, link_to(router, give_up_s=0.5) as link:
        received(link)
        start = time.monotonic()
        router.vanish()
        with pytest.raises(CoordinatorLostError, match=r"unreachable for 0\.5"):
            link.receive(BOUND_S)
        assert 0.5 <= time.monotonic() - start < BOUND_S / 2
        assert not link.may_step()
        with pytest.raises(CoordinatorLostError):
            link.receive()


def test_an_engine_that_has_to_wait_is_patient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout.coordinator.net.link._ANSWER_S", 0.1)
    give_up_s = 3.0
    with ScriptedRouter() as router, link_to(router, give_up_s=give_up_s) as link:
        received(link)
        router.vanish()
        router.received.clear()
        probe = Heartbeat(sequence=0)
        router.script = politely(lambda m: [probe] if isinstance(m, Register) else None)
        router.come_back()
        # Each of them waits a tenth of a second in vain.
        num = int(10 * give_up_s) + 5
        router.wait_until(lambda: [m for m in router.received if isinstance(m, Register)], num)
        router.script = polite
        assert received(link) == [register_ack()]
        assert link.may_step()


def test_an_engine_waits_for_a_coordinator_for_register_timeout_s():
    with ScriptedRouter() as router:
        router.vanish()
        with link_to(router, give_up_s=0.05) as link:
            with pytest.raises(CoordinatorLostError, match="no coordinator"):
                link.wait_registered(0.5)
            router.come_back()
            assert received(link) == [register_ack()]


def test_receive_returns_messages_of_one_session():
    inbox = Inbox(10, lambda: None, lambda: None)
    pause = Pause(command_id=1)
    for message in (pause, register_ack(), pause, pause, register_ack()):
        inbox.put([message])
    assert inbox.take_all(0) == [pause]
    assert inbox.take_all(0) == [register_ack(), pause, pause]
    assert inbox.take_all(0) == [register_ack()]
    assert inbox.take_all(0) == []


def test_a_connection_that_breaks_at_any_time_loses_no_message():
    with ScriptedRouter() as router, link_to(router) as link:
        for round_ in range(10):
            for message in acks(40, start=40 * round_):
                send(link, message)
            router.vanish()
            for message in acks(5, start=1000 + 5 * round_):
                send(link, message)
            router.come_back()
        expected = {ack.command_id for ack in [*acks(400), *acks(50, start=1000)]}
        until(
            lambda: {ack.command_id for ack in router.wait_for(Ack)} == expected,
            "all answers have arrived",
        )
        until(lambda: link.outbox.num_kept == 0, "all frames are confirmed")


def test_messages_are_received_after_their_connection_is_lost():
    """The link's thread stands still until both are there: the message and the loss."""
    stands_still, may_go_on = threading.Event(), threading.Event()

    def held_status() -> EngineStatus:
        stands_still.set()
        assert may_go_on.wait(BOUND_S)
        return status()

    with ScriptedRouter() as router, link_to(router, status=held_status) as link:
        received(link)
        assert stands_still.wait(BOUND_S)
        router.send(ReplyAck(attempts=()))
        router.vanish()
        try:
            until(lambda: link._dealer._monitor.poll(0) != 0, "the connection is lost")
        finally:
            may_go_on.set()
        assert received(link) == [ReplyAck(attempts=())]


def test_answers_to_nothing_that_was_asked_are_dropped():
    with ScriptedRouter() as router, link_to(router) as link:
        received(link)
        router.send(register_ack(), Heartbeat(sequence=10**6), ReplyAck(attempts=()))
        assert received(link) == [ReplyAck(attempts=())]
        assert link.may_step()


@given(
    st.lists(
        st.tuples(st.sampled_from(["sleep", "beat", "answer", "register", "end"]), st.floats(0, 3)),
        max_size=40,
    )
)
def test_the_lease_ends_no_later_than_a_lease_after_something_that_was_sent(events):
    lease, now, lease_s = Lease(), 0.0, 5.0
    sent: list[tuple[int, float]] = []
    confirmed, alive = float("-inf"), False
    for what, amount in events:
        if what == "sleep":
            now += amount
        elif what == "beat":
            sent.append((lease.heartbeat(now), now))
        elif what == "answer" and sent:
            sequence, sent_at = sent[int(amount * 7) % len(sent)]
            lease.answered(sequence, now)
            if alive and now < confirmed + lease_s:
                confirmed = max(confirmed, sent_at)
        elif what == "register":
            lease.begin(lease_s, now - amount)
            confirmed, alive, sent = now - amount, True, []
        elif what == "end":
            lease.end()
            confirmed, alive, sent = float("-inf"), False, []
        assert lease.until <= confirmed + lease_s
        assert lease.until > float("-inf") or not alive


@given(st.lists(st.sampled_from(["put", "send", "beat", "receive", "break"]), max_size=60))
def test_sent_frames_are_kept_until_a_heartbeat_confirms_them(events):
    outbox, lease, arrived, num_put = Outbox(1000, 2**20, lambda: None), Lease(), [], 0
    lease.begin(1.0, 0.0)
    connection: list[object] = []  # frames and heartbeats on their way
    answers: list[int] = []

    def send(frame: bytes) -> bool:
        connection.extend(frames_in(frame))
        return True

    for what in [*events, "send", "beat", "receive", "receive"]:
        if what == "put":
            outbox.put(str(num_put).encode())
            num_put += 1
        elif what == "send":
            outbox.send_all(send)
        elif what == "beat":
            connection.append(lease.heartbeat(0.0, outbox.num_sent))
        elif what == "receive":
            for answer in answers:
                outbox.confirm(lease.answered(answer, 0.0))
            answers = [item for item in connection if isinstance(item, int)]
            arrived += [int(item) for item in connection if isinstance(item, bytes)]
            connection = []
        elif what == "break":
            arrived += [int(f) for f in connection[: len(connection) // 2] if isinstance(f, bytes)]
            connection, answers = [], []
            outbox.rewind()
            lease.begin(1.0, 0.0)
    assert set(arrived) == set(range(num_put))
    assert list(dict.fromkeys(arrived)) == list(range(num_put))
    for answer in answers:
        outbox.confirm(lease.answered(answer, 0.0))
    assert not outbox.num_kept  # all of it is known to have arrived


CHILD = """
    import time
    from rollout.coordinator.net.link import Link
    from tests.coordinator.test_link import received, registration, status

    link = Link({port}, handshake=registration, status=status)
    received(link)
    last = time.monotonic()
    print("stepping", flush=True)  # and may be stopped at once
    while True:
        may_step, now = link.may_step(), time.monotonic()
        # It stood still before or after the question, so that is put again.
        if now - last > {lease_s} or not may_step:
            print(f"stood still {{link.may_step()}}", flush=True)
            break
        last = now
        time.sleep(0.001)
    received(link)
    print(f"registered {{link.may_step()}}", flush=True)
    link.close()
"""


def test_may_step_is_false_after_the_process_was_stopped_past_its_lease():
    lease_s = 1.0

    def script(message: Message) -> list[Message] | None:
        is_first = isinstance(message, Register) and len(router.received) == 1
        return [register_ack(lease_s=lease_s)] if is_first else None

    with ScriptedRouter(politely(script)) as router:
        child = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error",
                "-c",
                textwrap.dedent(CHILD.format(port=router.port, lease_s=lease_s)),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout.readline() == "stepping\n"
            child.send_signal(signal.SIGSTOP)
            time.sleep(1.5 * lease_s)
            child.send_signal(signal.SIGCONT)
            assert child.stdout.readline() == "stood still False\n"
            assert child.stdout.readline() == "registered True\n"
            assert child.wait(BOUND_S) == 0
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
        router.wait_for(Disconnect)
        assert len(router.wait_for(Register)) == 2


# ---- the end


def test_a_failed_engine_disconnects_with_is_fault():
    with ScriptedRouter() as router:
        with contextlib.suppress(ZeroDivisionError), link_to(router) as link:
            received(link)
            raise ZeroDivisionError("in a step")
        (disconnect,) = router.wait_for(Disconnect)
        assert disconnect.is_fault
        assert "ZeroDivisionError('in a step')" in disconnect.reason


def test_close_sends_queued_messages_disconnects_and_ends_the_thread():
    num_threads = threading.active_count()
    with ScriptedRouter() as router:
        link = link_to(router)
        received(link)
        for message in acks(50):
            send(link, message)
        link.close("enough")
        link.close()
        assert router.wait_for(Disconnect) == [Disconnect(reason="enough")]
        assert router.wait_for(Ack, 50) == acks(50)
        assert not link.may_step()
        with pytest.raises(LinkClosedError):
            link.receive()
        with pytest.raises(LinkClosedError):
            send(link, Ack(command_id=0))
    assert threading.active_count() == num_threads


def test_closing_wakes_an_engine_that_waits():
    with ScriptedRouter() as router, link_to(router) as link:
        received(link)
        threading.Timer(0.1, link.close).start()
        with pytest.raises(LinkClosedError):
            link.receive(BOUND_S)


def test_several_threads_may_close_at_once():
    with ScriptedRouter() as router:
        for _ in range(20):
            link = link_to(router)
            received(link)
            threads = [threading.Thread(target=link.close) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(BOUND_S)
                assert not thread.is_alive()


def test_closing_does_not_wait_for_a_coordinator_that_is_away():
    with ScriptedRouter() as router:
        router.vanish()
        link = link_to(router)
        send(link, Ack(command_id=0))
        start = time.monotonic()
        link.close()
        assert time.monotonic() - start < BOUND_S / 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callable_that_fails_ends_the_link_and_is_named():
    def broken() -> EngineStatus:
        raise ValueError("no status today")

    with ScriptedRouter() as router, link_to(router, status=broken) as link:
        with pytest.raises(RolloutError, match="no status today"):
            received(link, num=2)
        assert not link.may_step()


def test_frames_without_room_wait_and_do_not_end_the_session() -> None:
    with contextlib.ExitStack() as last:
        router = RouterSocket("127.0.0.1", None, max_frame_bytes=2**20)
        context, waker = zmq.Context(), SelfPipe()
        dealer = DealerSocket(context, router.address, waker, max_frame_bytes=2**20, curve=None)
        for end in (router.close, context.term, waker.close, dealer.close):
            last.callback(end)
        outbox = Outbox(2, 2**20, lambda: None)
        outbox.put(b"first")
        outbox.send_all(dealer.send)
        dealer.socket.disconnect(router.address)  # as if it were lost, before any event says so
        outbox.put(b"second")
        outbox.send_all(dealer.send)
        assert (outbox.num_sent, outbox.num_kept) == (1, 2)
        outbox.rewind()
        sent: list[bytes] = []
        outbox.send_all(lambda frame: sent.append(frame) is None)
        assert [single for frame in sent for single in frames_in(frame)] == [
            b"first",
            b"second",
        ]
