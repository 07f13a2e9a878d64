"""Requests through the coordinator's core: accepted once, run to the end, answered once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from rollout.control.commands import Pause, Resume, Suspend, Unpause
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    AssignRequest,
    Attempt,
    Disconnect,
    EngineReply,
    EngineReplyPartial,
    Heartbeat,
    Progress,
    ReplyAck,
)
from rollout.coordinator.routing.policies import LongestPrefixPolicy
from rollout.errors import ProtocolError
from rollout.wire import MAX_ITEMS
from tests.coordinator.fake_engine import FakeEngine, progress_of, token_run, tokens_of
from tests.coordinator.fake_fleet import LIMITS, FakeFleet
from tests.coordinator.message_strategies import joined


def assignments(engine: FakeEngine) -> list[AssignRequest]:
    return [message for message in engine.seen if isinstance(message, AssignRequest)]


def test_a_request_is_answered_with_its_tokens_and_forgotten_once_acknowledged() -> None:
    fleet = FakeFleet()
    client, engine = fleet.client(), fleet.engine()
    fleet.send(client, client.submission([5], streaming=True))
    fleet.run()
    fleet.finish()
    asked = client.asked[0]
    assert len(asked.replies) == 1
    assert asked.streamed == tokens_of(asked.seed, 0, 4)  # the last tokens come with the record
    assert len(fleet.part("RequestTable").requests) == 0
    assert not engine.ended


def test_a_group_goes_to_one_rank_and_round_robin_rotates_between_groups() -> None:
    fleet = FakeFleet()
    client, first, second = fleet.client(), fleet.engine(), fleet.engine()
    fleet.run()
    for _ in range(2):
        fleet.send(client, client.submission([3, 4, 5]))
    fleet.run()
    assert [len(a.samples) for a in assignments(first)] == [3]
    assert [len(a.samples) for a in assignments(second)] == [3]


def test_a_repeated_submit_runs_once_and_a_late_one_is_not_run_again() -> None:
    fleet = FakeFleet()
    client, engine = fleet.client(), fleet.engine()
    message = client.submission([4, 6])
    fleet.send(client, message, message)
    fleet.run()
    fleet.finish()
    fleet.send(client, message)
    fleet.run()
    assert len(assignments(engine)) == 1
    assert [len(asked.replies) for asked in client.asked.values()] == [1, 1]
    assert fleet.core.counters.num_duplicates == 4


def test_a_reply_is_kept_for_a_client_that_reconnects() -> None:
    fleet = FakeFleet()
    client, _ = fleet.client(), fleet.engine()
    client.acknowledges = False
    fleet.send(client, client.submission([4]))
    fleet.run()
    fleet.finish()
    assert len(fleet.part("RequestTable").requests) == 1
    client.acknowledges = True
    fleet.redial(client)
    fleet.run()
    assert len(client.asked[0].replies) == 2
    assert len(fleet.part("RequestTable").requests) == 0


def test_an_unreachable_client_gets_its_messages_again_after_its_next_heartbeat() -> None:
    fleet = FakeFleet()
    client, engine = fleet.client(), fleet.engine()
    fleet.send(client, client.submission([4]))
    fleet.run()
    fleet.cut(client)  # its replies bounce; the same connection then sends again
    while engine.held:
        fleet.send(engine, *engine.step())
        fleet.run(engine)
    assert fleet.core.counters.num_undelivered == 1
    fleet.attach(client, AbortRequest(attempts=()))
    fleet.run()
    assert not client.asked[0].replies, "a slow client's every message brought all its replies"
    fleet.send(client, Heartbeat(sequence=1))
    fleet.run()
    assert len(client.asked[0].replies) == 1


def test_progress_is_appended_by_offset_repeats_trimmed_and_gaps_refused() -> None:
    fleet = FakeFleet()
    client, engine = fleet.client(), fleet.engine()
    fleet.send(client, client.submission([20], streaming=True))
    fleet.run()
    (server_id,) = engine.held
    seed = client.asked[0].seed
    engine.held[server_id].num_tokens = 6
    runs = [token_run(seed, *run) for run in ((0, 4), (0, 4), (2, 6), (8, 10), (6, 7))]
    fleet.send(engine, *(progress_of(server_id, 0, run) for run in runs))
    fleet.run()
    assert client.asked[0].streamed == tokens_of(seed, 0, 7)
    assert fleet.core.counters.num_gaps == 1
    assert fleet.core.counters.num_duplicates == 2


def test_progress_of_many_requests_goes_to_each_of_their_clients() -> None:
    fleet = FakeFleet()
    engine, clients = fleet.engine(), [fleet.client(), fleet.client()]
    for client in clients:
        fleet.send(client, client.submission([20], streaming=True))
    fleet.run()
    seeds = [client.asked[0].seed for client in clients]
    ids = np.array([*engine.held, 10**9])  # and one that it should not have
    for start, end in ((0, 3), (3, 5)):
        runs = joined([token_run(seed, start, end) for seed in (*seeds, 1)])
        runs = structs.replace(runs, request_ids=ids, attempts=np.zeros(3, np.int64))
        fleet.send(engine, Progress(runs=runs))
        fleet.run()
    for client, seed in zip(clients, seeds, strict=True):
        assert client.asked[0].streamed == tokens_of(seed, 0, 5)
    (abort,) = [m for m in engine.seen if isinstance(m, AbortRequest)][:1]
    assert [attempt.request_id for attempt in abort.attempts] == [10**9]


def test_a_dead_engines_requests_go_on_elsewhere_from_the_last_reported_token() -> None:
    fleet = FakeFleet()
    client, first, second = fleet.client(), fleet.engine(), fleet.engine()
    fleet.send(client, client.submission([9, 9], streaming=True))
    fleet.run()
    fleet.step_all(3)
    fleet.cut(first)
    fleet.pass_time(LIMITS.engine_lease_s + 1)
    fleet.run()
    moved = [sample for message in assignments(second) for sample in message.samples]
    assert [sample.attempt for sample in moved] == [1, 1]
    assert [len(sample.resumed) for sample in moved if sample.resumed] == [3, 3]
    fleet.finish()
    assert [len(asked.replies) for asked in client.asked.values()] == [1, 1]


def test_samples_that_go_on_travel_alone_and_fresh_ones_of_a_group_together() -> None:
    fleet = FakeFleet()
    client, first, second = fleet.client(), fleet.engine(), fleet.engine()
    fleet.send(client, client.submission([9, 9, 9, 9]))
    fleet.run()
    ids = list(first.held)
    for server_id in ids[1:3]:
        first.held[server_id].num_tokens = 3
        fleet.send(first, first.report(server_id, 0))
    fleet.run()
    fleet.cut(first)
    fleet.pass_time(LIMITS.engine_lease_s + 1)
    fleet.run()
    moved = [[sample.request_id for sample in m.samples] for m in assignments(second)]
    assert moved == [[ids[0], ids[3]], [ids[1]], [ids[2]]]
    fleet.finish()
    assert [len(asked.replies) for asked in client.asked.values()] == [1] * 4


def test_a_request_with_max_lost_attempts_fails() -> None:
    fleet = FakeFleet(limits=replace(LIMITS, max_lost_attempts=3))
    client = fleet.client()
    fleet.send(client, client.submission([9], streaming=True))
    for _ in range(3):
        assert not client.asked[0].replies
        engine = fleet.engine()
        fleet.run()
        assert len(engine.held) == 1
        fleet.cut(engine)
        fleet.pass_time(LIMITS.engine_lease_s + 1)
        fleet.run()
    (reply,) = client.asked[0].replies
    assert reply.error is not None
    assert "3 engines failed while they ran this request" in str(reply.error.message)
    last = fleet.engine()
    fleet.run()
    assert not last.held


def test_a_failed_engine_counts_against_the_requests_that_it_names() -> None:
    fleet = FakeFleet(limits=replace(LIMITS, max_lost_attempts=1))
    client, engine = fleet.client(), fleet.engine()
    fleet.send(client, client.submission([9]), client.submission([9]))
    fleet.run()
    suspects = (Attempt(request_id=0), Attempt(request_id=1, attempt=7), Attempt(request_id=99))
    fleet.send(engine, Disconnect(reason="a step failed", is_fault=True, suspects=suspects))
    fleet.run()
    assert client.asked[0].replies[0].is_failed
    assert not client.asked[1].replies, "an attempt that counts no more was blamed"


def test_engines_that_disconnect_or_register_again_do_not_count_as_failed() -> None:
    fleet = FakeFleet(limits=replace(LIMITS, max_lost_attempts=1))
    client, engine = fleet.client(), fleet.engine()
    fleet.send(client, client.submission([9]))
    fleet.run()
    for _ in range(2):
        fleet.send(engine, Disconnect())
        fleet.run()
        fleet.cut(engine)
        engine = fleet.engine()
        fleet.run()
        assert len(engine.held) == 1
    fleet.redial(engine)
    fleet.run()
    fleet.finish()
    assert not client.asked[0].replies[0].is_failed


def test_an_attempt_that_its_engine_registers_again_does_not_count_as_failed() -> None:
    fleet = FakeFleet(limits=replace(LIMITS, max_lost_attempts=2))
    client, engine = fleet.client(), fleet.engine()
    fleet.send(client, client.submission([9]))
    fleet.run()
    for _ in range(3):
        fleet.pass_time(LIMITS.engine_lease_s + 1, silent=[engine])
        fleet.redial(engine)
        fleet.run()
        assert len(engine.held) == 1
    fleet.finish()
    assert not client.asked[0].replies[0].is_failed
    assert fleet.core.counters.num_reassigned == 0


def test_an_engine_that_cannot_be_reached_is_removed_at_once() -> None:
    fleet = FakeFleet()
    client, first, second = fleet.client(), fleet.engine(), fleet.engine()
    fleet.run()
    fleet.cut(first)
    fleet.send(client, client.submission([4]), client.submission([4]))
    fleet.run()
    assert list(fleet.core.ranks()) == [1]
    assert len(second.held) == 2


def test_messages_of_outdated_attempts_are_dropped() -> None:
    fleet = FakeFleet()
    client, first, second = fleet.client(), fleet.engine(), fleet.engine()
    fleet.send(client, client.submission([4]))
    fleet.run()
    late = first.step(4)
    fleet.pass_time(LIMITS.engine_lease_s + 1, silent=[first])
    fleet.send(first, *late)
    fleet.run()
    assert first.must_register
    assert len(second.held) == 1
    assert not client.asked[0].replies
    fleet.redial(first)
    fleet.run()
    assert not first.ended, "the attempt was not to be kept"
    fleet.finish()
    assert len(client.asked[0].replies) == 1


def test_requests_are_recorded_from_0() -> None:
    recorded: list[tuple[int, int, int]] = []

    class Recorder:
        def record(self, *record: int) -> None:
            recorded.append(record)

    fleet = FakeFleet(recorder=Recorder())
    client, _ = fleet.client(), fleet.engine()
    fleet.send(client, client.submission([4, 4]), client.submission([4]))
    fleet.run()
    assert recorded == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]


def test_stale_progress_is_counted_and_its_sender_asked_to_abort() -> None:
    fleet = FakeFleet()
    client, engine = fleet.client(), fleet.engine()
    fleet.send(client, client.submission([9]))
    fleet.run()
    (server_id,) = engine.held
    engine.held[server_id].num_tokens = 2
    run = token_run(client.asked[0].seed, 0, 2)
    fleet.send(engine, progress_of(server_id, 7, run), progress_of(99, 0, run))
    fleet.run()
    aborts = [m for m in engine.seen if isinstance(m, AbortRequest)]
    assert [a.attempts[0] for a in aborts] == [
        Attempt(request_id=server_id, attempt=7),
        Attempt(request_id=99, attempt=0),
    ]
    assert fleet.core.counters.num_stale == 2
    fleet.send(engine, EngineReply(request_id=99, attempt=3, record=b"x"))
    fleet.run()
    assert ReplyAck(attempts=(Attempt(request_id=99, attempt=3),)) in engine.seen


def test_an_engine_that_registers_again_keeps_the_attempts_that_count() -> None:
    fleet = FakeFleet()
    client, first, second = fleet.client(), fleet.engine(), fleet.engine()
    fleet.run()
    fleet.send(client, client.submission([9]), client.submission([9]))
    fleet.run()
    fleet.step_all()
    fleet.redial(first)
    fleet.run()
    assert len(first.held) == len(second.held) == 1
    assert fleet.core.counters.num_reassigned == 0
    fleet.finish()
    assert [len(asked.replies) for asked in client.asked.values()] == [1, 1]


def test_without_an_engine_requests_wait_and_then_fail_clearly() -> None:
    fleet = FakeFleet()
    client = fleet.client()
    fleet.send(client, client.submission([3]))
    fleet.run()
    fleet.pass_time(LIMITS.orphan_deadline_s - 1)
    engine = fleet.engine()
    fleet.run()
    assert len(engine.held) == 1
    fleet.cut(engine)
    fleet.pass_time(LIMITS.engine_lease_s + LIMITS.orphan_deadline_s + 1)
    fleet.run()
    (reply,) = client.asked[0].replies
    assert reply.error is not None
    assert "no engine" in str(reply.error.message)


def test_a_deadline_aborts_with_a_clear_error_and_the_tokens_so_far() -> None:
    fleet = FakeFleet()
    client, _ = fleet.client(), fleet.engine()
    fleet.send(client, client.submission([99, 99], deadline_s=3.0))
    fleet.run()
    fleet.step_all()
    fleet.pass_time(3)
    fleet.run()
    for asked in client.asked.values():
        (reply,) = asked.replies
        assert reply.is_failed
        assert reply.record is not None
        assert reply.error is not None
        assert "deadline" in str(reply.error.message)


def test_a_deadline_does_not_wait_for_an_engine_that_is_silent() -> None:
    fleet = FakeFleet()
    client, engine = fleet.client(), fleet.engine()
    fleet.send(client, client.submission([99], deadline_s=3.0))
    fleet.run()
    fleet.pass_time(3 + LIMITS.abort_grace_s)  # the abort is not delivered
    fleet.run(client)
    (reply,) = client.asked[0].replies
    assert reply.record is None
    fleet.run()
    assert not engine.held
    assert len(client.asked[0].replies) == 1


def test_an_aborted_request_does_not_move_to_another_engine() -> None:
    fleet = FakeFleet()
    client, first, second = fleet.client(), fleet.engine(), fleet.engine()
    fleet.send(client, client.submission([99]))
    fleet.run()
    fleet.send(client, AbortRequest(attempts=(Attempt(request_id=0),)))
    fleet.run(client)
    fleet.redial(first)  # without a word of what it held
    first.held.clear()
    fleet.cut(first)
    fleet.pass_time(LIMITS.abort_grace_s - 1)
    fleet.attach(first, first.registration())
    fleet.run()
    (reply,) = client.asked[0].replies
    assert reply.error is not None
    assert "aborted" in str(reply.error.message)
    assert not assignments(second)


def test_an_assignment_too_large_to_send_fails_its_requests() -> None:
    fleet = FakeFleet()
    client, engine = fleet.client(), fleet.engine()
    fleet.run()
    out = fleet.core.handle(client.identity, client.submission([3, 3]), fleet.now)
    ((identity, message),) = [one for one in out if isinstance(one[1], AssignRequest)]
    fault = ProtocolError("too large")
    fleet.route(fleet.core.undelivered(identity, message, fault, fleet.now))
    fleet.run()
    assert all(asked.replies[0].error is not None for asked in client.asked.values())
    assert not engine.held


def test_assignments_that_are_never_sent_take_no_credit() -> None:
    fleet = FakeFleet()
    client, _ = fleet.client(), fleet.engine(max_requests=8)
    fleet.run()
    for _ in range(30):
        out = fleet.core.handle(client.identity, client.submission([3]), fleet.now)
        ((identity, message),) = [one for one in out if isinstance(one[1], AssignRequest)]
        fault = ProtocolError("too large")
        fleet.route(fleet.core.undelivered(identity, message, fault, fleet.now))
        fleet.run()
    fleet.send(client, client.submission([3]))
    fleet.run()
    fleet.finish()
    (reply,) = client.asked[30].replies
    assert not reply.is_failed


def test_an_abort_is_answered_in_time_while_its_engine_registers_again_amid_a_command() -> None:
    fleet = FakeFleet()
    client, first, second = fleet.client(), fleet.engine(), fleet.engine(ignores={"Pause"})
    fleet.send(client, client.submission([99]))
    fleet.run()
    assert first.held
    fleet.send(client, Pause(command_id=1))
    fleet.run()
    fleet.send(client, AbortRequest(attempts=(Attempt(request_id=0),)))
    fleet.run(client)
    fleet.redial(first)  # the abort was on its way over the former connection
    fleet.run()
    fleet.pass_time(LIMITS.abort_grace_s)
    fleet.run()
    (reply,) = client.asked[0].replies
    assert reply.error is not None
    assert "aborted" in str(reply.error.message)
    fleet.pass_time(LIMITS.command_deadline_s)
    fleet.run()
    assert first.has_entered
    assert not first.held
    assert not assignments(second)


def test_an_engine_that_registers_during_a_command_gets_a_heartbeat() -> None:
    fleet = FakeFleet()
    client, first, _ = fleet.client(), fleet.engine(), fleet.engine(ignores={"Pause"})
    fleet.run()
    fleet.send(client, Pause(command_id=1))
    fleet.run()
    first.seen.clear()
    for _ in range(2):  # it dials again as long as it is not admitted
        fleet.redial(first)
        fleet.run()
    assert [type(message) for message in first.seen] == [Heartbeat, Heartbeat]
    fleet.pass_time(LIMITS.command_deadline_s)
    fleet.run()
    assert first.has_entered


def test_a_coordinator_that_was_stopped_does_not_take_its_peers_for_dead() -> None:
    fleet = FakeFleet()
    client, _ = fleet.client(), fleet.engine()
    fleet.send(client, client.submission([3]))
    fleet.run()
    fleet.now += 100
    fleet.core.extend_leases(100)
    fleet.run()
    assert list(fleet.core.ranks()) == [0]
    fleet.finish()
    assert not client.asked[0].replies[0].is_failed


def test_a_client_that_vanishes_or_leaves_has_its_requests_aborted() -> None:
    fleet = FakeFleet()
    stays, vanishes, leaves = fleet.client(), fleet.client(), fleet.client()
    engine = fleet.engine()
    for client in (stays, vanishes, leaves):
        fleet.send(client, client.submission([50]))
    fleet.run()
    assert len(engine.held) == 3
    fleet.send(leaves, Disconnect())
    fleet.cut(vanishes)
    fleet.run()
    for _ in range(LIMITS_S):
        fleet.step_all(0)
        fleet.pass_time(1)
    fleet.run()
    assert len(engine.held) == 1
    assert fleet.core.counters.num_abandoned == 2
    assert len(fleet.part("RequestTable").requests) == 1


LIMITS_S = int(LIMITS.client_lease_s) + 2


def test_too_many_requests_are_refused_and_taken_later() -> None:
    fleet = FakeFleet(limits=replace(LIMITS, max_client_requests=2))
    client, _ = fleet.client(), fleet.engine()
    fleet.send(client, client.submission([3, 3]), client.submission([3]))
    fleet.run()
    assert fleet.core.counters.num_refused == 1
    (reply,) = client.asked[2].replies
    assert reply.error is not None
    fleet.finish()
    client.asked[2].replies.clear()
    fleet.send(client, client.submitted[1])
    fleet.run()
    fleet.finish()
    assert not client.asked[2].replies[0].is_failed


def test_prompts_are_routed_by_their_blocks() -> None:
    fleet = FakeFleet(LongestPrefixPolicy(), block_size_tokens=2)
    client, first, second = fleet.client(), fleet.engine(), fleet.engine()
    fleet.run()
    prompts = [np.array(p, np.int32) for p in ([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 9, 9])]
    for prompt in prompts:
        fleet.send(client, client.submission([3], prompt_tokens=prompt))
    fleet.run()
    assert [len(first.held), len(second.held)] == [2, 1]


@pytest.mark.parametrize(("mode", "is_kept"), [("persist", True), ("recompute", False)])
def test_prompts_do_not_follow_blocks_that_a_suspend_has_dropped(mode: str, is_kept: bool) -> None:
    fleet = FakeFleet(LongestPrefixPolicy(), block_size_tokens=2)
    client, first, second = fleet.client(), fleet.engine(), fleet.engine()
    fleet.run()
    prompt = np.array([1, 2, 3, 4], np.int32)
    fleet.send(client, client.submission([3], prompt_tokens=prompt))
    fleet.run()
    assert first.held
    fleet.finish()
    for kind, arguments in (
        *((Pause, {}), (Suspend, {"mode": mode})),
        *((Resume, {}), (Unpause, {})),
    ):
        fleet.give(client, client.command(kind, **arguments))
    fleet.send(client, client.submission([3], prompt_tokens=prompt))
    fleet.run()
    assert bool(first.held) is is_kept
    assert bool(second.held) is not is_kept


def test_a_slow_client_gets_only_undelivered_messages_again() -> None:
    fleet = FakeFleet()
    client, _ = fleet.client(), fleet.engine()
    client.acknowledges = False
    fleet.send(client, *(client.submission([2]) for _ in range(4)))
    fleet.run()
    fleet.finish()
    second = client.asked[1].replies[0]
    fleet.core.undelivered(client.identity, second, None, fleet.now)
    for num_replies in (2, 2):
        fleet.send(client, Heartbeat(sequence=1))
        fleet.run()
        assert [len(a.replies) for a in client.asked.values()] == [1, num_replies, 1, 1]


def test_undelivered_streamed_tokens_are_sent_again() -> None:
    fleet = FakeFleet()
    client, engine = fleet.client(), fleet.engine()
    fleet.send(client, client.submission([9], streaming=True))
    fleet.run()
    for _ in range(2):
        fleet.send(engine, *engine.step())
        fleet.run(engine)
    missed = [m for m in fleet.to_peer[client.identity] if isinstance(m, EngineReplyPartial)]
    assert [m.tokens.offset for m in missed] == [0, 2]
    fleet.to_peer[client.identity].clear()
    for message in reversed(missed):
        fleet.core.undelivered(client.identity, message, None, fleet.now)
    fleet.send(client, Heartbeat(sequence=1))
    fleet.run()
    partials = [m for m in client.seen if isinstance(m, EngineReplyPartial)]
    assert [(m.tokens.offset, len(m.tokens)) for m in partials] == [(0, 4)]


def test_reported_tokens_count_against_a_bound_and_streams_go_on_beyond_it() -> None:
    fleet = FakeFleet(limits=replace(LIMITS, max_token_log_bytes=100))
    client, first, second = fleet.client(), fleet.engine(), fleet.engine()
    fleet.run()
    fleet.send(client, client.submission([40]), client.submission([40], streaming=True))
    fleet.run()
    for _ in range(6):
        fleet.step_all(2)
    assert client.asked[1].streamed == tokens_of(client.asked[1].seed, 0, 12)
    table = fleet.part("RequestTable")
    logged = [len(request.log) for request in table.requests.values()]
    assert logged[0] < 12 == logged[1]
    fleet.cut(first)
    fleet.pass_time(1)
    fleet.run()
    assert second.held[0].num_tokens == logged[0]
    fleet.finish()
    assert [len(asked.replies) for asked in client.asked.values()] == [1, 1]
    assert table.num_log_bytes == 0


def test_more_attempts_than_a_message_may_name_are_sent_in_parts() -> None:
    fleet = FakeFleet()
    engine = fleet.engine()
    fleet.run()
    (session,) = fleet.part("Registry").engines.values()
    num_seen, many = len(engine.seen), [Attempt(request_id=999)] * (MAX_ITEMS + 1)
    session.acknowledged.extend(many)
    session.aborted.extend(many)
    fleet.run()
    sent = [m for m in engine.seen[num_seen:] if isinstance(m, (ReplyAck, AbortRequest))]
    assert [len(message.attempts) for message in sent] == [MAX_ITEMS, 1] * 2
    assert [type(message) for message in sent] == [ReplyAck] * 2 + [AbortRequest] * 2


def test_an_engine_gets_one_reply_ack_and_one_abort_per_turn() -> None:
    fleet = FakeFleet()
    client, engine = fleet.client(), fleet.engine()
    fleet.run()
    fleet.send(client, client.submission([9] * 5), client.submission([2] * 3))
    fleet.run()
    fleet.send(engine, *engine.step())
    fleet.send(client, Disconnect())
    for peer in (engine, client):
        while fleet.to_core[peer.identity]:
            fleet.handle(peer.identity, fleet.to_core[peer.identity].popleft())
    num_seen = len(engine.seen)
    fleet.run()
    acks = [m for m in engine.seen[num_seen:] if isinstance(m, ReplyAck)]
    aborts = [m for m in engine.seen[num_seen:] if isinstance(m, AbortRequest)]
    assert [len(m.attempts) for m in acks[:1] + aborts] == [3, 5]
    assert not engine.held


# ---- handshake


def test_connect_ack_has_the_window_and_is_resumed() -> None:
    fleet = FakeFleet(limits=replace(LIMITS, max_client_requests=7, max_client_request_bytes=900))
    client = fleet.client()
    fleet.run()
    assert client.connect_ack is not None
    assert (client.connect_ack.max_requests, client.connect_ack.max_request_bytes) == (7, 900)
    assert not client.connect_ack.is_resumed
    fleet.cut(client)
    fleet.redial(client)
    fleet.run()
    assert client.connect_ack.is_resumed
    fleet.pass_time(10 * LIMITS.client_lease_s, silent=[client])
    fleet.cut(client)
    fleet.redial(client)
    fleet.run()
    assert not client.connect_ack.is_resumed
