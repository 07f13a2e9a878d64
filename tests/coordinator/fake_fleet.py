"""A fleet in memory: the coordinator's core, with engines and clients that answer at once.

Every message is encoded and decoded on its way. Nothing happens unless a test asks for it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from rollout.control.commands import Command, engine_state_of
from rollout.coordinator.core import core, dispatcher
from rollout.coordinator.core.context import CoordinatorLimits
from rollout.coordinator.core.core import CoordinatorCore
from rollout.coordinator.protocol.codec import decode, encode
from rollout.coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    Connect,
    Heartbeat,
    Nack,
    Register,
    UpdateWeights,
)
from rollout.coordinator.routing.policies import RoundRobinPolicy, RoutingPolicy
from rollout.wire import Message
from tests.coordinator.fake_client import FakeClient
from tests.coordinator.fake_engine import FakeEngine

LIMITS = CoordinatorLimits(
    client_lease_s=30, engine_lease_s=10, heartbeat_s=1, progress_deadline_s=20,
    orphan_deadline_s=40, push_wait_s=12, command_deadline_s=15, abort_grace_s=5, commit_grace_s=5,
)  # fmt: skip

Peer = FakeEngine | FakeClient
# Of what a core makes for itself, by their module: what a test looks into.
_PARTS = {
    core: (
        *("Clients", "Context", "Dispatcher", "Fleet", "CommandQueue"),
        *("Recent", "Registry", "RequestTable"),
    ),
    dispatcher: ("GroupQueue",),
}


def _core_and_parts(
    policy: RoutingPolicy, **options: Any
) -> tuple[CoordinatorCore, dict[str, list[Any]]]:
    """A core, and the parts that it has made, by the name of their class."""
    parts: dict[str, list[Any]] = {}

    def kept(name: str, kind: type) -> Callable[..., Any]:
        def make(*arguments: Any, **more: Any) -> Any:
            parts.setdefault(name, []).append(kind(*arguments, **more))
            return parts[name][-1]

        return make

    with pytest.MonkeyPatch.context() as patch:
        for module, names in _PARTS.items():
            for name in names:
                patch.setattr(module, name, kept(name, getattr(module, name)))
        return CoordinatorCore(policy, **options), parts


class FakeFleet:
    """Peers, the links between them and the core, and the time."""

    def __init__(self, policy: RoutingPolicy | None = None, **options: Any) -> None:
        options.setdefault("limits", LIMITS)
        options.setdefault("data_parallel_size", 2)
        options.setdefault("coordinator_id", b"k" * 16)
        self.policy = policy or RoundRobinPolicy()
        self.core, self.parts = _core_and_parts(self.policy, **options)
        self.now = 100.0
        self.peers: dict[bytes, Peer] = {}
        self.to_core: dict[bytes, deque[bytes]] = {}
        self.to_peer: dict[bytes, deque[Message]] = {}
        self._identities = (b"peer%d" % number for number in itertools.count())
        self._ids = (number.to_bytes(16, "big") for number in itertools.count(1))

    def part(self, name: str) -> Any:
        """Return the core's one part of this class."""
        (part,) = self.parts[name]
        return part

    # ---- peers

    def client(self) -> FakeClient:
        client = FakeClient(next(self._identities), next(self._ids))
        self.attach(client, Connect(protocol_version=PROTOCOL_VERSION, client_id=client.client_id))
        return client

    def engine(self, **state: Any) -> FakeEngine:
        engine = FakeEngine(next(self._identities), next(self._ids), **state)
        self.attach(engine, engine.registration())
        return engine

    def attach(self, peer: Peer, handshake: Message) -> None:
        self.peers[peer.identity] = peer
        self.to_core[peer.identity], self.to_peer[peer.identity] = deque(), deque()
        self.send(peer, handshake)

    def cut(self, peer: Peer) -> None:
        """End the connection of a peer, with all messages that were on their way."""
        self.peers.pop(peer.identity, None)
        self.to_core.pop(peer.identity, None)
        self.to_peer.pop(peer.identity, None)

    def redial(self, peer: Peer) -> None:
        """Connect again, with the handshake."""
        self.cut(peer)
        peer.identity = next(self._identities)
        if isinstance(peer, FakeEngine):
            self.attach(peer, peer.registration())
        else:
            self.attach(peer, Connect(protocol_version=PROTOCOL_VERSION, client_id=peer.client_id))

    def is_attached(self, peer: Peer) -> bool:
        return self.peers.get(peer.identity) is peer

    # ---- messages

    def send(self, peer: Peer, *messages: Message) -> None:
        if self.is_attached(peer):
            self.to_core[peer.identity].extend(encode(message) for message in messages)

    def route(self, outgoing: Iterable[tuple[bytes, Message]]) -> None:
        """Deliver messages in order. Messages that follow from an undeliverable one come last."""
        waiting = deque(outgoing)
        while waiting:
            identity, message = waiting.popleft()
            if identity in self.to_peer:
                self.to_peer[identity].append(decode(encode(message)))
            else:
                waiting.extend(self.core.undelivered(identity, message, None, self.now))

    def move_one(self, peer: Peer) -> bool:
        """Move one message each way. Returns whether there was one."""
        identity = peer.identity
        frames, messages = self.to_core.get(identity), self.to_peer.get(identity)
        moved = bool(frames or messages)
        if messages:
            self.send(peer, *peer.receive(messages.popleft()))
        if frames:
            self.handle(identity, frames.popleft())
        return moved

    def handle(self, identity: bytes, frame: bytes) -> None:
        """Let the core handle a frame. Checks that a new state or version of the fleet is the state
        or version of all engines.

        An engine that registers with this frame gets both in the answer, before it does anything.
        """
        core = self.core
        state, version, ranks = core.state, core.weights_version, core.ranks().items()
        outgoing = core.handle(identity, frame, self.now)
        comes_in = identity if isinstance(decode(frame), Register) else None
        engines_now = [p for p in self.peers.values() if isinstance(p, FakeEngine)]
        by_id = {p.engine_id: p for p in engines_now if p.identity != comes_in}
        engines = [by_id[i] for _, i in ranks & core.ranks().items() if i in by_id]
        if core.state is not state:
            assert {engine.state for engine in engines} <= {engine_state_of(core.state.name).name}
        if core.weights_version != version:
            promised = {(engine.prepared or engine).version for engine in engines}
            assert version < core.weights_version
            assert promised <= {core.weights_version}, "decided before all had voted"
        self.route(outgoing)

    def run(self, *only: Peer) -> None:
        """Move all messages, of some peers or of all."""
        self.route(self.core.tick(self.now))
        while any([self.move_one(peer) for peer in only or list(self.peers.values())]):
            self.route(self.core.tick(self.now))

    def run_to(self, peer: Peer) -> None:
        """Let a peer receive its waiting messages, and drop its answers."""
        messages = self.to_peer[peer.identity]
        while messages:
            peer.receive(messages.popleft())

    def give(self, client: FakeClient, message: Command | UpdateWeights) -> Ack | Nack | None:
        """Send a command and move all messages. Returns the answer, if there is one."""
        self.send(client, message)
        self.run()
        return client.answer(message)

    def pass_time(self, seconds: float, *, silent: Sequence[Peer] = ()) -> None:
        """Let time pass; all peers but the silent ones send a heartbeat each second."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 1.0, end)
            for peer in list(self.peers.values()):
                if not any(peer is other for other in silent):
                    is_engine = isinstance(peer, FakeEngine)
                    beat = peer.heartbeat() if is_engine else Heartbeat(sequence=0)
                    self.handle(peer.identity, encode(beat))
            self.route(self.core.tick(self.now))

    def step_all(self, num_tokens: int = 2) -> None:
        for peer in list(self.peers.values()):
            if isinstance(peer, FakeEngine):
                self.send(peer, *peer.step(num_tokens))
        self.run()

    def finish(self, max_steps: int = 500) -> None:
        """Step until no engine has a request."""
        for _ in range(max_steps):
            self.step_all()
            for peer in list(self.peers.values()):
                if isinstance(peer, FakeEngine) and peer.must_register:
                    self.redial(peer)
            self.run()
            engines = [peer for peer in self.peers.values() if isinstance(peer, FakeEngine)]
            if not any(engine.held for engine in engines):
                return
        raise AssertionError("the engines do not come to an end")
