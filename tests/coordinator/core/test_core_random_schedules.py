"""Random schedules of the core: peers fail, messages repeat and come late. Every request is
answered once, with its own tokens, and the fleet's state is the one that all engines confirmed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from rollout.control.commands import Command, IncrementStaleness, Pause, Resume, Suspend, Unpause
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    Attempt,
    EngineReply,
    Progress,
    UpdateWeights,
)
from rollout.coordinator.routing.policies import LongestPrefixPolicy
from tests.coordinator.fake_client import FakeClient
from tests.coordinator.fake_engine import FakeEngine, progress_of, source_of, token_run, tokens_of
from tests.coordinator.fake_fleet import LIMITS, FakeFleet, Peer
from tests.run_kind import scaled

MAX_PEERS = 4
COMMANDS = [
    Pause,
    Unpause,
    Suspend,
    Resume,
    IncrementStaleness,
]
FAULTS = ["Pause", "Suspend", "Unpause", "Prepare", "Commit", "SetGenerationEpoch"]
pick = st.integers(0, 99)


class RandomSchedule(RuleBasedStateMachine):
    """`dead` engines never come back; `silent` ones are stopped, and may continue later."""

    def __init__(self) -> None:
        super().__init__()
        limits = replace(LIMITS, max_answers=4, max_answered_ids=64)
        self.fleet = FakeFleet(LongestPrefixPolicy(max_rows=8), block_size_tokens=2, limits=limits)
        self.clients: list[FakeClient] = [self.fleet.client() for _ in range(2)]
        self.engines: list[FakeEngine] = [self.fleet.engine() for _ in range(2)]
        self.silent: list[Peer] = []
        self.said: list[tuple[FakeEngine, Progress | EngineReply]] = []
        self.gone: list[FakeClient] = []
        self.commands: list[tuple[FakeClient, Command | UpdateWeights]] = []
        self.fleet.run()

    def one_of(self, peers: list[Any], number: int) -> Any:
        return peers[number % len(peers)]

    def awake(self) -> list[Peer]:
        return [
            peer
            for peer in self.fleet.peers.values()
            if not any(peer is other for other in self.silent)
        ]

    # ---- clients

    @precondition(lambda self: len(self.clients) < MAX_PEERS)
    @rule()
    def client_comes(self) -> None:
        self.clients.append(self.fleet.client())

    @precondition(lambda self: self.clients)
    @rule(
        number=pick,
        counts=st.lists(st.integers(1, 12), min_size=1, max_size=3),
        streaming=st.booleans(),
        prompt=st.lists(st.integers(0, 1), max_size=5),
        deadline_s=st.none() | st.floats(1, 60),
    )
    def submit(
        self,
        number: int,
        counts: list[int],
        streaming: bool,
        prompt: list[int],
        deadline_s: float | None,
    ) -> None:
        client = self.one_of(self.clients, number)
        tokens = np.array(prompt, np.int32)
        message = client.submission(
            counts, streaming=streaming, prompt_tokens=tokens, deadline_s=deadline_s
        )
        self.fleet.send(client, message)

    @precondition(lambda self: any(client.submitted for client in self.clients))
    @rule(number=pick, which=pick)
    def submit_again(self, number: int, which: int) -> None:
        """Submit known requests again. A coordinator that forgot the client gets no answered ones,
        which it would accept as new."""
        client = self.one_of([c for c in self.clients if c.submitted], number)
        message = self.one_of(client.submitted, which)
        session = self.fleet.part("Clients").sessions.get(client.client_id)
        samples = tuple(
            s
            for s in message.samples
            if not client.asked[s.request_id].replies
            or (session and (s.request_id in session.requests or s.request_id in session.answered))
        )
        if samples:
            self.fleet.send(client, structs.replace(message, samples=samples))

    @precondition(lambda self: any(client.asked for client in self.clients))
    @rule(number=pick, which=pick)
    def abort(self, number: int, which: int) -> None:
        client = self.one_of([c for c in self.clients if c.asked], number)
        attempt = Attempt(request_id=which % len(client.asked))
        self.fleet.send(client, AbortRequest(attempts=(attempt,)))

    @precondition(lambda self: self.clients)
    @rule(number=pick)
    def client_redials(self, number: int) -> None:
        """Lose all messages on their way. Like a real client, it repeats unanswered ones."""
        client = self.one_of(self.clients, number)
        self.fleet.redial(client)
        for message in client.submitted:
            samples = tuple(s for s in message.samples if not client.asked[s.request_id].replies)
            if samples:
                self.fleet.send(client, structs.replace(message, samples=samples))
        for _, command in [c for c in self.commands if c[0] is client]:
            if client.answer(command) is None:
                self.fleet.send(client, command)

    @precondition(lambda self: len(self.clients) > 1)
    @rule(number=pick)
    def client_vanishes(self, number: int) -> None:
        client = self.one_of(self.clients, number)
        self.clients.remove(client)
        self.gone.append(client)
        self.fleet.cut(client)

    # ---- engines

    @precondition(lambda self: len(self.engines) < MAX_PEERS)
    @rule()
    def engine_comes(self) -> None:
        self.engines.append(self.fleet.engine())

    @precondition(lambda self: self.engines)
    @rule(number=pick)
    def engine_dies(self, number: int) -> None:
        engine = self.one_of(self.engines, number)
        self.engines.remove(engine)
        self.fleet.cut(engine)

    @precondition(lambda self: self.engines)
    @rule(number=pick)
    def engine_redials(self, number: int) -> None:
        self.fleet.redial(self.one_of(self.engines, number))

    @precondition(lambda self: self.engines)
    @rule(number=pick)
    def engine_is_stopped_or_goes_on(self, number: int) -> None:
        engine = self.one_of(self.engines, number)
        if any(engine is other for other in self.silent):
            self.silent = [other for other in self.silent if other is not engine]
        else:
            self.silent.append(engine)

    @precondition(lambda self: self.engines)
    @rule(number=pick, num_tokens=st.integers(1, 3))
    def engine_steps(self, number: int, num_tokens: int) -> None:
        engine = self.one_of(self.engines, number)
        messages = engine.step(num_tokens)
        self.fleet.send(engine, *messages)
        self.said += [(engine, m) for m in messages]  # type: ignore[misc]
        del self.said[:-20]

    @precondition(lambda self: self.said)
    @rule(number=pick)
    def engine_repeats_itself(self, number: int) -> None:
        engine, message = self.one_of(self.said, number)
        self.fleet.send(engine, message)

    @precondition(lambda self: any(engine.held for engine in self.engines))
    @rule(number=pick, start=st.integers(0, 12), end=st.integers(0, 12))
    def engine_reports_any_piece(self, number: int, start: int, end: int) -> None:
        """Report tokens in any order: also runs that leave a gap, and empty ones."""
        engine = self.one_of([e for e in self.engines if e.held], number)
        request_id, held = self.one_of(list(engine.held.items()), number)
        end = min(end, held.num_tokens)
        piece = token_run(held.seed, min(start, end), end, engine.version)
        self.fleet.send(engine, progress_of(request_id, held.attempt, piece))

    @precondition(lambda self: self.engines)
    @rule(number=pick, fault=st.none() | st.sampled_from(FAULTS), is_silent=st.booleans())
    def engine_gets_a_fault_or_is_mended(
        self, number: int, fault: str | None, is_silent: bool
    ) -> None:
        engine = self.one_of(self.engines, number)
        engine.refuses, engine.ignores = set(), set()
        if fault is not None:
            (engine.ignores if is_silent else engine.refuses).add(fault)

    # ---- commands

    @precondition(lambda self: self.clients)
    @rule(number=pick, kind=st.sampled_from(COMMANDS))
    def command(self, number: int, kind: type[Command[Any]]) -> None:
        client = self.one_of(self.clients, number)
        self.commands.append((client, client.command(kind)))
        self.fleet.send(client, self.commands[-1][1])

    @precondition(lambda self: self.clients)
    @rule(number=pick, in_flight=st.booleans(), is_kept=st.booleans())
    def update(self, number: int, in_flight: bool, is_kept: bool) -> None:
        client = self.one_of(self.clients, number)
        version = self.fleet.core.weights_version + 1
        source = structs.replace(source_of(version), is_kept=is_kept)
        message = client.update(source, version=version, in_flight=in_flight)
        self.commands.append((client, message))
        self.fleet.send(client, message)

    @precondition(lambda self: any(client in self.clients for client, _ in self.commands))
    @rule(number=pick)
    def command_again(self, number: int) -> None:
        client, message = self.one_of(self.commands[-4:], number)
        self.fleet.send(client, message)

    # ---- what moves

    @rule(number=pick, count=st.integers(1, 5))
    def some_messages_move(self, number: int, count: int) -> None:
        awake = self.awake()
        for index in range(count if awake else 0):
            self.fleet.move_one(self.one_of(awake, number + index))

    @rule()
    def all_messages_move(self) -> None:
        self.fleet.route(self.fleet.core.tick(self.fleet.now))
        while any([self.fleet.move_one(peer) for peer in self.awake()]):
            self.fleet.route(self.fleet.core.tick(self.fleet.now))
        for peer in self.awake():
            if isinstance(peer, FakeEngine) and peer.must_register:
                self.fleet.redial(peer)

    @rule()
    def everybody_works(self) -> None:
        """Let all engines step, so that most requests end."""
        self.all_messages_move()
        for peer in self.awake():
            if isinstance(peer, FakeEngine):
                self.fleet.send(peer, *peer.step(2))
        self.all_messages_move()

    @rule(seconds=st.sampled_from([0.5, 3.0, 12.0, 35.0]))
    def time_passes(self, seconds: float) -> None:
        self.fleet.pass_time(seconds, silent=self.silent)

    # ---- what must hold

    @invariant()
    def engines_are_in_the_state_that_the_fleet_confirms(self) -> None:
        core = self.fleet.core
        if self.fleet.part("CommandQueue").is_busy or self.fleet.part("Fleet").is_diverged:
            return
        by_id = {engine.engine_id: engine for engine in self.engines}
        for engine_id in core.ranks().values():
            engine = by_id.get(engine_id)
            if engine is None or not self.fleet.is_attached(engine) or engine.must_register:
                continue
            waiting = self.fleet.to_peer[engine.identity]
            on_its_way = [*waiting, *self.fleet.to_core[engine.identity]]
            if not on_its_way:
                assert engine.state == core.state.name
                assert engine.version == core.weights_version
                assert engine.prepared is None

    @invariant()
    def tables_are_bounded_by_what_is_asked(self) -> None:
        num_asked = sum(len(client.asked) for client in [*self.clients, *self.gone])
        table, dispatcher = self.fleet.part("RequestTable"), self.fleet.part("Dispatcher")
        assert len(table.requests) <= num_asked
        assert len(self.fleet.part("Context").timers) <= 2 * num_asked + 64
        assert set(dispatcher.waiting_groups()) <= set(table.groups)
        for group in table.groups.values():
            unfinished = [r for r in table.requests.values() if r.group is group and not r.reply]
            assert unfinished == list(group.unfinished.values())
            assert {r.server_id for r in unfinished if not r.engine} == set(group.waiting)
        for engine in self.fleet.part("Registry").engines.values():
            assert all(request.engine is engine for request in engine.requests.values())
        for client in self.fleet.part("Clients").sessions.values():
            held = list(client.requests.values())
            assert held == [r for r in table.requests.values() if r.client is client]
            assert client.num_unfinished == sum(r.reply is None for r in held)
        assert table.num_log_bytes == sum(r.log.num_bytes for r in table.requests.values())

    @invariant()
    def what_waits_has_no_engine_with_room(self) -> None:
        has_room = any(
            engine.is_ready
            and engine.num_granted > engine.num_assigned
            and len(engine.requests) < engine.max_held
            for engine in self.fleet.part("Registry").engines.values()
        )
        assert not (has_room and self.fleet.part("GroupQueue").groups)

    def teardown(self) -> None:
        fleet = self.fleet
        self.silent.clear()
        for engine in self.engines:
            engine.refuses, engine.ignores = set(), set()
        self.engines.append(fleet.engine())
        fleet.pass_time(LIMITS.command_deadline_s + 1)
        self.client_redials(0)
        self.settle()
        first = self.clients[0]
        for kind in (Pause, Resume, Pause, Unpause):
            fleet.give(first, first.command(kind))
        self.settle()
        assert fleet.core.state.name == "RUNNING"
        version = fleet.core.weights_version + 1  # for engines that wait for a push
        fleet.give(first, first.update(source_of(version), version=version, in_flight=True))
        self.settle()
        for _ in range(60):
            fleet.step_all()
            self.settle()
            fleet.pass_time(1)
        for client in self.clients:
            if fleet.is_attached(client):
                self.check(client)
        for client in list(self.clients):
            fleet.cut(client)
        fleet.pass_time(LIMITS.client_lease_s + 1)
        assert len(fleet.part("RequestTable").requests) == 0
        assert not fleet.part("RequestTable").groups

    def settle(self) -> None:
        for _ in range(6):
            self.all_messages_move()
            for client in self.clients:
                is_known = client.client_id in self.fleet.part("Clients").sessions
                if not is_known:
                    self.client_redials(self.clients.index(client))
        self.all_messages_move()

    def check(self, client: FakeClient) -> None:
        for asked in client.asked.values():
            assert asked.replies, "a request was lost"
            if asked.is_streaming:
                assert asked.streamed == tokens_of(asked.seed, 0, len(asked.streamed))


RandomSchedule.TestCase.settings = settings(
    max_examples=scaled(40),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_random_schedules = RandomSchedule.TestCase


def test_an_engine_that_registers_again_during_a_command_gets_the_resulting_state():
    schedule = RandomSchedule()
    schedule.engine_is_stopped_or_goes_on(number=0)
    schedule.command(kind=Pause, number=0)
    schedule.all_messages_move()
    schedule.engine_is_stopped_or_goes_on(number=0)
    schedule.engine_redials(number=0)
    schedule.all_messages_move()
    schedule.engines_are_in_the_state_that_the_fleet_confirms()
    assert {engine.state for engine in schedule.engines} == {"PAUSED"}
    schedule.teardown()
