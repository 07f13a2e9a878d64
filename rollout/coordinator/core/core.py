"""CoordinatorCore: passes each message to the part that handles it, and returns the answers.

Used by `rollout.coordinator.coordinator`, which has the socket and the clock. CoordinatorCore makes
the other parts of `rollout.coordinator.core`. All parts keep their state in memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from rollout.control.commands import COMMANDS
from rollout.coordinator.core.clients import Clients
from rollout.coordinator.core.commands import CommandQueue
from rollout.coordinator.core.context import Context, CoordinatorLimits, Counters
from rollout.coordinator.core.dispatcher import Dispatcher
from rollout.coordinator.core.fleet import CoordinatorState, Fleet, Registry
from rollout.coordinator.core.request_lifecycle import RequestLifecycle
from rollout.coordinator.core.request_table import (
    ClientSession,
    EngineSession,
    Recent,
    RequestTable,
)
from rollout.coordinator.protocol.codec import ProtocolVersionError, decode, failures_of
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    Ack,
    Connect,
    Credit,
    Disconnect,
    EngineReply,
    Heartbeat,
    Nack,
    Progress,
    Register,
    ReplyAck,
    SubmitRequest,
    UpdateWeights,
    WireError,
    nack_of,
)
from rollout.coordinator.routing.policies import RoutingPolicy
from rollout.coordinator.routing.schedule_recorder import ScheduleRecorder
from rollout.errors import ProtocolError, RequestAbortedError, RolloutError
from rollout.wire import Message

logger = logging.getLogger(__name__)

Outgoing = list[tuple[bytes, Message]]
# A function of a session, its message and the time.
Handler = Callable[[Any, Any, float], None]


class CoordinatorCore:
    """Returns the messages to send for each received message and each due timer.

    The caller passes every frame to `handle`, and calls `tick` at `next_deadline` at the latest.
    The caller sends the returned messages in order. Times are seconds of one monotonic clock. The
    same calls give the same results."""

    def __init__(
        self,
        policy: RoutingPolicy,
        *,
        coordinator_id: bytes,
        data_parallel_size: int,
        limits: CoordinatorLimits | None = None,
        block_size_tokens: int | None = None,
        deterministic_mode: bool = False,
        recorder: ScheduleRecorder | None = None,
        refused: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`block_size_tokens` is the size of the blocks by which prompts are routed, or None to
        ignore prefixes. `deterministic_mode` admits engines once all have registered, with ranks in
        the order of their ids. `refused` returns the number of refused connections by reason."""
        self._context = context = Context(
            coordinator_id, limits or CoordinatorLimits(), refused=refused
        )
        self.counters: Counters = context.counters
        self._fleet, self._table = fleet, table = Fleet(), RequestTable()
        self._dispatcher = dispatcher = Dispatcher(
            *(context, table, policy), block_size_tokens=block_size_tokens, recorder=recorder
        )
        self._requests = requests = RequestLifecycle(context, table, dispatcher)
        num_awaited = data_parallel_size if deterministic_mode else 1
        self._registry = Registry(context, dispatcher, requests, fleet, num_awaited=num_awaited)
        self._commands = CommandQueue(self._registry, requests)
        self._clients = Clients(context, requests, fleet, data_parallel_size=data_parallel_size)
        self._from_engine = self._handlers_of_engines()
        self._from_client = self._handlers_of_clients()
        self._when_due: Mapping[str, Callable[[Any, float], None]] = {
            "client": self._clients.check,
            "engine": self._registry.check,
            "probe": self._registry.probe,
            "deadline": requests.deadline_passed,
            "orphan": requests.orphaned,
            "grace": requests.grace_passed,
            "command": self._commands.deadline_passed,
        }
        self._logged: Recent[bytes, None] = Recent(context.limits.max_noted_peers)
        self._answered_at: Recent[bytes, float] = Recent(context.limits.max_noted_peers)

    def _handlers_of_engines(self) -> Mapping[type[Message], Handler]:
        requests, registry, commands = self._requests, self._registry, self._commands
        return {
            Progress: requests.progress,
            EngineReply: requests.end,
            Credit: self._dispatcher.credit,
            Heartbeat: registry.heartbeat,
            Ack: commands.answered,
            Nack: commands.answered,
            Register: lambda engine, message, now: registry.register(engine.identity, message, now),
            Disconnect: registry.disconnect,
        }

    def _handlers_of_clients(self) -> Mapping[type[Message], Handler]:
        requests, clients, commands = self._requests, self._clients, self._commands
        return {
            SubmitRequest: requests.submit,
            ReplyAck: requests.acknowledged,
            Heartbeat: clients.heartbeat,
            AbortRequest: requests.abort,
            **dict.fromkeys(COMMANDS, commands.submit),
            UpdateWeights: commands.submit,
            Connect: lambda client, message, now: clients.connect(client.identity, message, now),
            Disconnect: lambda client, message, now: clients.remove(client),
        }

    # ---- state

    @property
    def state(self) -> CoordinatorState:
        return self._fleet.state

    @property
    def weights_version(self) -> int:
        return self._fleet.weights_version

    @property
    def is_over(self) -> bool:
        """Whether a Shutdown has run, so that the coordinator must end."""
        return self._commands.is_over

    def ranks(self) -> dict[int, bytes]:
        """Return the ids of the engines that get work, by rank."""
        engines = self._registry.ready_engines()
        return dict(sorted((engine.rank, engine.engine_id) for engine in engines))

    def is_engine(self, identity: bytes) -> bool:
        """Return whether the connection `identity` belongs to a registered engine."""
        return isinstance(self._context.sessions.get(identity), EngineSession)

    def next_deadline(self) -> float | None:
        """Return the latest time for the next call of `tick`, or None if no timer is set."""
        return self._context.timers.first_due_at()

    # ---- input

    def handle(self, identity: bytes, frame: bytes | memoryview | Message, now: float) -> Outgoing:
        """Handle one frame of a peer, or one decoded message, and return the messages to send. A
        malformed frame is counted and logged."""
        self.counters.num_frames += 1
        message = frame if isinstance(frame, Message) else self._decoded(identity, frame, now)
        if message is not None:
            try:
                self._dispatch(identity, message, now)
            except ProtocolError as fault:
                self._count_malformed(identity, fault)
        return self._settled(now)

    def tick(self, now: float) -> Outgoing:
        """Handle the timers that are due, and return the messages to send. The messages include
        each engine's queued acknowledgements and aborts."""
        is_due = False
        while (key := self._context.timers.pop_due(now)) is not None:
            is_due, (kind, number) = True, key
            self._when_due[kind](number, now)
            self._settle(now)
        self._registry.send_queued()
        return self._settled(now) if is_due else self._take_outbox()

    def undelivered(
        self, identity: bytes, message: Message, fault: ProtocolError | None, now: float
    ) -> Outgoing:
        """Handle a message that could not be sent, and return the messages to send.

        `fault` says why no frame can carry the message, or is None if the peer cannot be reached.
        If no frame can carry the message, its requests fail, and a command's answer is sent without
        the engines' results. An unreachable engine is removed. An unreachable client gets the
        message again with its next heartbeat."""
        self.counters.num_undelivered += 1
        session = self._context.sessions.get(identity)
        if fault is not None:
            self._log_first(identity, f"cannot be sent a message: {fault}")
            if isinstance(message, Ack) and isinstance(session, ClientSession):
                self._commands.shorten_answer(session, message.command_id)
            else:
                self._requests.unsendable(session, message, WireError.of(fault))
        elif isinstance(session, EngineSession):
            self._registry.remove(session, "it cannot be reached", now, sends_nack=False)
        elif session is not None:
            session.miss(message)
        return self._settled(now)

    def extend_leases(self, seconds: float) -> None:
        """Extend all leases by the seconds in which the coordinator process was stopped."""
        for session in self._context.sessions.values():
            session.extend_lease(seconds)

    def close(self, reason: str) -> Outgoing:
        """Fail all unfinished requests and commands, and disconnect all peers. Returns the messages
        to send."""
        self._commands.close(reason)
        self._requests.fail_all(WireError.of(RequestAbortedError(reason)))
        self._registry.send_queued()
        for session in self._context.sessions.values():
            self._context.send(session, Disconnect.because(reason))
        return self._take_outbox()

    # ---- by sender

    def _dispatch(self, identity: bytes, message: Message, now: float) -> None:
        session = self._context.sessions.get(identity)
        if session is None:
            self._dispatch_handshake(identity, message, now)
            return
        session.renew_lease(now)
        handlers = self._from_client if isinstance(session, ClientSession) else self._from_engine
        handler = handlers.get(type(message))
        if handler is None:
            self.counters.num_unexpected += 1
            self._log_first(identity, f"sent a {type(message).__name__}, which it may not")
        else:
            handler(session, message, now)

    def _dispatch_handshake(self, identity: bytes, message: Message, now: float) -> None:
        """Connect or register a peer that has no session. A message that is no handshake gets a
        Nack, at most one per heartbeat interval."""
        if isinstance(message, Connect):
            self._clients.connect(identity, message, now)
            return
        if isinstance(message, Register):
            self._registry.register(identity, message, now)
            return
        self.counters.num_unknown_peers += 1
        name, limits = type(message).__name__, self._context.limits
        self._log_first(identity, f"sent a {name} before a handshake")
        if now - self._answered_at.get(identity, -math.inf) < limits.heartbeat_s:
            return
        self._answered_at.pop(identity, None)  # so that it becomes the newest entry
        self._answered_at[identity] = now
        error = RolloutError("the coordinator does not know you; connect or register first")
        self._context.outbox.append((identity, nack_of(None, error)))

    def _decoded(self, identity: bytes, frame: bytes | memoryview, now: float) -> Message | None:
        """Return the message in a frame, or None if the frame is malformed. A malformed frame of a
        connected peer fails the requests and the command that it names. A handshake of another
        protocol version gets a Nack."""
        try:
            return decode(frame)
        except ProtocolError as fault:
            self._count_malformed(identity, fault)
            session = self._context.sessions.get(identity)
            if isinstance(fault, ProtocolVersionError):
                self._context.outbox.append((identity, nack_of(None, fault)))
            elif isinstance(session, ClientSession):
                for failure in failures_of(bytes(frame), fault, self._from_client):
                    if isinstance(failure, EngineReply):
                        self._requests.refuse(session, failure)
                    else:
                        self._commands.refuse(session, failure)
            elif session is not None:
                for failure in failures_of(bytes(frame), fault, self._from_engine):
                    self._from_engine[type(failure)](session, failure, now)
            return None

    def _count_malformed(self, identity: bytes, fault: ProtocolError) -> None:
        self.counters.num_malformed += 1
        self._log_first(identity, f"sent a malformed frame: {fault}")

    def _log_first(self, identity: bytes, what: str) -> None:
        if identity not in self._logged:
            self._logged[identity] = None
            logger.warning("peer %s %s", identity.hex()[:32], what)

    # ---- after each call

    def _settle(self, now: float) -> None:
        """Report removed engines to the running commands. While no command runs, admit engines and
        begin the next command."""
        registry, commands = self._registry, self._commands
        while commands.has_any or not registry.is_settled:
            while registry.departed:
                commands.engine_left(registry.departed.pop(0), now)
            if commands.is_busy:
                return
            registry.settle(now)
            if not commands.advance(now):
                return

    def _settled(self, now: float) -> Outgoing:
        """Call `_settle`, assign waiting requests, and return the messages to send."""
        self._settle(now)
        self._registry.probe_waiting()
        self._dispatcher.dispatch()
        return self._take_outbox()

    def _take_outbox(self) -> Outgoing:
        outbox, self._context.outbox = self._context.outbox, []
        return outbox
