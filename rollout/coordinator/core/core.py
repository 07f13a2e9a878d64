"""CoordinatorCore: messages in, messages out. No socket, no clock, no thread."""

from __future__ import annotations

import logging
from collections import OrderedDict

from rollout.coordinator.core.clients import Clients
from rollout.coordinator.core.context import Context, Counters
from rollout.coordinator.core.dispatcher import Dispatcher
from rollout.coordinator.core.fleet import CoordinatorState, Fleet
from rollout.coordinator.core.limits import CoordinatorLimits
from rollout.coordinator.core.pending_commands import PendingCommands
from rollout.coordinator.core.registry import Registry
from rollout.coordinator.core.request_lifecycle import RequestLifecycle
from rollout.coordinator.core.request_table import RequestTable
from rollout.coordinator.core.sessions import (
    ClientSession,
    EngineSession,
    RecentIds,
    Session,
)
from rollout.coordinator.protocol.messages import (
    ALLOWED,
    AbortRequest,
    Ack,
    Command,
    Connect,
    Credit,
    Disconnect,
    EngineReply,
    EngineReplyPartial,
    Heartbeat,
    Message,
    Nack,
    Progress,
    ProtocolVersionError,
    Register,
    ReplyAck,
    Role,
    SubmitRequest,
    UpdateWeights,
    WireError,
    decode,
    nack_of,
)
from rollout.coordinator.routing.policies import RoutingPolicy
from rollout.coordinator.routing.schedule_recorder import ScheduleRecorder
from rollout.errors import ProtocolError, RequestAbortedError, RolloutError

logger = logging.getLogger(__name__)

Outgoing = list[tuple[bytes, Message]]
_FROM_ENGINES, _FROM_CLIENTS = ALLOWED[Role.ENGINE], ALLOWED[Role.CLIENT]


class CoordinatorCore:
    """Its owner passes every frame to `handle`, calls `tick` after a batch of them and when
    `next_deadline` has come, and sends what they return in order. Times are seconds of any one
    monotonic clock. The same calls give the same results.
    """

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
    ) -> None:
        """`block_size_tokens`: of the blocks that prompts are routed by, None for no look at them.
        `deterministic_mode`: engines are taken once all are there, ranked by their ids.
        """
        self._context = context = Context(limits or CoordinatorLimits())
        self._fleet, self._table = Fleet(), RequestTable()
        self._dispatcher = Dispatcher(
            *(context, self._table, policy), block_size_tokens=block_size_tokens, recorder=recorder
        )
        self._requests = RequestLifecycle(context, self._table, self._dispatcher)
        self._registry = Registry(
            *(context, self._table, self._dispatcher, self._requests, self._fleet),
            coordinator_id=coordinator_id,
            num_awaited=data_parallel_size if deterministic_mode else 1,
        )
        self._commands = PendingCommands(self._registry, self._requests)
        self._clients = Clients(
            *(context, self._requests, self._fleet),
            coordinator_id=coordinator_id,
            data_parallel_size=data_parallel_size,
        )
        self._logged: RecentIds[bytes] = RecentIds(context.limits.max_noted_peers)
        self._answered_at: OrderedDict[bytes, float] = OrderedDict()  # strangers

    # ---- what can be read

    @property
    def state(self) -> CoordinatorState:
        return self._fleet.state

    @property
    def weights_version(self) -> int:
        return self._fleet.weights_version

    @property
    def counters(self) -> Counters:
        return self._context.counters

    @property
    def is_over(self) -> bool:
        """Whether a SHUTDOWN has been done."""
        return self._commands.is_over

    @property
    def num_requests_held(self) -> int:
        """Unfinished ones and kept replies."""
        return len(self._table)

    def ranks(self) -> dict[int, bytes]:
        """The engines that get work: their ids by rank."""
        engines = self._registry.ready_engines()
        return dict(sorted((engine.rank, engine.engine_id) for engine in engines))

    def is_engine(self, identity: bytes) -> bool:
        """Whether it counts as lost if a message cannot be sent there."""
        return identity in self._registry.by_identity

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest; None if only a frame can bring anything."""
        first = self._context.timers.first()
        return None if first is None else first[0]

    # ---- what comes in

    def handle(self, identity: bytes, frame: bytes | memoryview | Message, now: float) -> Outgoing:
        """Take one frame of a peer, whatever it holds; returns what to send."""
        self.counters.num_frames += 1
        try:
            message = decode(frame) if isinstance(frame, (bytes, memoryview)) else frame
            self._dispatch(identity, message, now)
        except ProtocolError as fault:
            self.counters.num_malformed += 1
            self._log_once(identity, f"sent a malformed frame: {fault}")
            if isinstance(fault, ProtocolVersionError):
                self._context.outbox.append((identity, nack_of(None, fault)))
        return self._settled(now)

    def tick(self, now: float) -> Outgoing:
        """Do what is due, and end the turn; returns what to send."""
        while (key := self._context.timers.pop_due(now)) is not None:
            match key:
                case ("client", bytes(client_id)):
                    self._clients.check(client_id, now)
                case ("engine", bytes(engine_id)):
                    self._registry.check(engine_id, now)
                case ("probe", _):
                    self._registry.probe(now)
                case ("deadline", int(group_id)):
                    self._requests.deadline_passed(group_id, now)
                case ("orphan", int(group_id)):
                    self._requests.orphaned(group_id)
                case ("grace", int(server_id)):
                    self._requests.grace_passed(server_id)
                case ("command", int(number)):
                    self._commands.deadline_passed(number, now)
            self._settle(now)
        self._context.end_turn()
        return self._settled(now)

    def undelivered(
        self, identity: bytes, message: Message, fault: ProtocolError | None, now: float
    ) -> Outgoing:
        """A message could not be sent: it is too large (`fault`), or its peer is not there.

        An engine that cannot be reached has gone; a client gets it with its next heartbeat.
        """
        self.counters.num_undelivered += 1
        session = self._session(identity)
        if fault is not None:
            self._log_once(identity, f"cannot be sent a message: {fault}")
            if isinstance(message, Ack) and isinstance(session, ClientSession):
                self._commands.shorten_answer(session, message.command_id)
            else:
                self._requests.unsendable(session, message, WireError.of(fault))
        elif isinstance(session, EngineSession):
            self._registry.remove(session, "it cannot be reached", now, is_told=False)
        elif session is not None:
            self._clients.missed(session, message)
        return self._settled(now)

    def stood_still(self, seconds: float) -> None:
        """Its owner was stopped for so long: nobody could be heard, which is nobody's fault."""
        self._registry.stood_still(seconds)
        self._clients.stood_still(seconds)

    def close(self, reason: str) -> Outgoing:
        """The coordinator goes: all that is unfinished fails, and every peer is told."""
        self._commands.close(reason)
        self._requests.fail_all(WireError.of(RequestAbortedError(reason)))
        self._context.end_turn()
        for identity in [*self._registry.by_identity, *self._clients.by_identity]:
            self._context.outbox.append((identity, Disconnect(reason=reason)))
        return self._take_outbox()

    # ---- by who sends it

    def _session(self, identity: bytes) -> Session | None:
        return self._registry.by_identity.get(identity) or self._clients.by_identity.get(identity)

    def _dispatch(self, identity: bytes, message: Message, now: float) -> None:
        """Raises ProtocolError for what a peer may send, but not so."""
        session = self._session(identity)
        if session is not None:
            session.last_seen = now
            is_engine = isinstance(session, EngineSession)
            if type(message) not in (_FROM_ENGINES if is_engine else _FROM_CLIENTS):
                self.counters.num_unexpected += 1
                self._log_once(identity, f"sent a {type(message).__name__}, which it may not")
            elif isinstance(session, EngineSession):
                self._from_engine(session, message, now)
            else:
                self._from_client(session, message, now)
        elif isinstance(message, Connect):
            self._clients.connect(identity, message, now)
        elif isinstance(message, Register):
            self._registry.register(identity, message, now)
        else:
            self._from_stranger(identity, message, now)

    def _from_engine(self, engine: EngineSession, message: Message, now: float) -> None:
        if isinstance(message, Progress):
            for partial in message.partials():
                self._requests.progress(engine, partial)
        elif isinstance(message, EngineReplyPartial):
            self._requests.progress(engine, message)
        elif isinstance(message, EngineReply):
            self._requests.end(engine, message)
        elif isinstance(message, Credit):
            self._dispatcher.credit(engine, message.num_granted)
        elif isinstance(message, Heartbeat):
            self._registry.heartbeat(engine, message, now)
        elif isinstance(message, (Ack, Nack)):
            self._commands.answered(engine, message, now)
        elif isinstance(message, Register):
            self._registry.register(engine.identity, message, now)
        elif isinstance(message, Disconnect):
            self._registry.disconnect(engine, message, now)

    def _from_client(self, client: ClientSession, message: Message, now: float) -> None:
        if isinstance(message, SubmitRequest):
            self._requests.submit(client, message, now)
        elif isinstance(message, ReplyAck):
            self._requests.acknowledged(client, message)
        elif isinstance(message, Heartbeat):
            self._clients.heartbeat(client, message)
        elif isinstance(message, AbortRequest):
            self._requests.abort(client, message, now)
        elif isinstance(message, (Command, UpdateWeights)):
            self._commands.submit(client, message, now)
        elif isinstance(message, Connect):
            self._clients.connect(client.identity, message, now)
        elif isinstance(message, Disconnect):
            self._clients.remove(client)

    def _from_stranger(self, identity: bytes, message: Message, now: float) -> None:
        """It may be a peer that was taken for dead: say so, but not for each of its messages."""
        self.counters.num_strangers += 1
        name, limits = type(message).__name__, self._context.limits
        self._log_once(identity, f"sent a {name} without having shaken hands")
        last = self._answered_at.get(identity)
        if last is not None and now - last < limits.heartbeat_s:
            return
        self._answered_at[identity] = now
        self._answered_at.move_to_end(identity)
        if len(self._answered_at) > limits.max_noted_peers:
            self._answered_at.popitem(last=False)
        error = RolloutError("the coordinator does not know you; connect or register first")
        self._context.outbox.append((identity, nack_of(None, error)))

    def _log_once(self, identity: bytes, what: str) -> None:
        """Log what a peer did, unless something was logged of it before."""
        if self._logged.add(identity):
            logger.warning("peer %s %s", identity.hex()[:32], what)

    # ---- after each call

    def _settle(self, now: float) -> None:
        """Tell running commands who has left; between commands admit engines, and go on."""
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
        """Settle, assign what engines have room for by now, and return what to send."""
        self._settle(now)
        self._dispatcher.dispatch()
        return self._take_outbox()

    def _take_outbox(self) -> Outgoing:
        outbox, self._context.outbox = self._context.outbox, []
        return outbox
