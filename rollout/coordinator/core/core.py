"""CoordinatorCore: messages in, messages out. No socket, no clock, no thread."""

from __future__ import annotations

from itertools import count

from rollout.coordinator.core.books import Books
from rollout.coordinator.core.client_desk import ClientDesk
from rollout.coordinator.core.command_desk import CommandDesk
from rollout.coordinator.core.counters import Counters
from rollout.coordinator.core.engine_replies import EngineReplies
from rollout.coordinator.core.fleet import CoordinatorState, Fleet, first_id_of_life
from rollout.coordinator.core.limits import CoordinatorLimits
from rollout.coordinator.core.membership import Membership
from rollout.coordinator.core.operations import Parts
from rollout.coordinator.core.peer_notes import PeerNotes
from rollout.coordinator.core.placement import Placement
from rollout.coordinator.core.request_desk import RequestDesk
from rollout.coordinator.core.sessions import ClientPeer, EnginePeer, Peer
from rollout.coordinator.core.submissions import Submissions
from rollout.coordinator.core.text_jobs import TextJob, TextResult, Tokenized
from rollout.coordinator.protocol.messages import (
    ALLOWED,
    AbortRequest,
    Ack,
    Command,
    Connect,
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

Outgoing = list[tuple[bytes, Message]]
_FROM_ENGINES, _FROM_CLIENTS = ALLOWED[Role.ENGINE], ALLOWED[Role.CLIENT]


class CoordinatorCore:
    """Its owner passes every frame to `handle`, calls `tick` after a batch of them and when
    `next_deadline` has come, sends what they return in order, and does the text jobs. Times are
    seconds of any one monotonic clock. The same calls give the same results.
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
        has_tokenizer: bool = False,
        recorder: ScheduleRecorder | None = None,
    ) -> None:
        """`block_size_tokens`: of the blocks that prompts are routed by, None for no look at them.
        `deterministic_mode`: engines are taken once all are there, ranked by their ids.
        """
        self._books = books = Books(limits or CoordinatorLimits(), first_id_of_life(coordinator_id))
        self._fleet = fleet = Fleet(count(books.requests.first_id))
        self._placement = placement = Placement(
            books, policy, block_size_tokens=block_size_tokens, recorder=recorder
        )
        self._desk = desk = RequestDesk(books, placement)
        self._submissions = Submissions(books, placement, desk, has_tokenizer=has_tokenizer)
        self._replies = EngineReplies(books, placement, desk, has_tokenizer=has_tokenizer)
        self._membership = Membership(
            *(books, placement, desk, fleet),
            coordinator_id=coordinator_id,
            num_awaited=data_parallel_size if deterministic_mode else 1,
        )
        parts = Parts(books, fleet, placement, self._membership)
        self._commands = CommandDesk(parts, desk)
        self._clients = ClientDesk(
            *(books, desk, fleet),
            coordinator_id=coordinator_id,
            data_parallel_size=data_parallel_size,
        )
        self._notes = PeerNotes(books.limits.max_noted_peers, books.limits.heartbeat_s)

    # ---- what can be read

    @property
    def state(self) -> CoordinatorState:
        return self._fleet.state

    @property
    def weights_version(self) -> int:
        return self._fleet.weights_version

    @property
    def counters(self) -> Counters:
        return self._books.counters

    @property
    def is_over(self) -> bool:
        """Whether a SHUTDOWN has been done."""
        return self._commands.is_over

    @property
    def num_requests_held(self) -> int:
        """Unfinished ones and kept replies."""
        return len(self._books.requests)

    def ranks(self) -> dict[int, bytes]:
        """The engines that get work: their ids by rank."""
        engines = self._books.sessions.ready_engines()
        return dict(sorted((engine.rank, engine.engine_id) for engine in engines))

    def is_engine(self, identity: bytes) -> bool:
        """Whether it counts as lost if a message cannot be sent there."""
        return isinstance(self._books.sessions.peer(identity), EnginePeer)

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest; None if only a frame can bring anything."""
        return self._books.timers.next_at()

    # ---- what comes in

    def handle(self, identity: bytes, frame: bytes | memoryview | Message, now: float) -> Outgoing:
        """Take one frame of a peer, whatever it holds; returns what to send."""
        self._books.counters.num_frames += 1
        peer = self._books.sessions.peer(identity)
        try:
            message = decode(frame) if isinstance(frame, (bytes, memoryview)) else frame
            self._dispatch(identity, peer, message, now)
        except ProtocolError as fault:
            self._books.counters.num_malformed += 1
            self._notes.log_once(identity, f"sent a malformed frame: {fault}")
            if isinstance(fault, ProtocolVersionError):
                self._books.outbox.append((identity, nack_of(None, fault)))
        self._settle(now)
        return self._take_outbox()

    def tick(self, now: float) -> Outgoing:
        """Do what is due, and acknowledge what engines have ended; returns what to send."""
        while (key := self._books.timers.pop_due(now)) is not None:
            kind, number = key
            if isinstance(number, bytes):
                if kind == "client":
                    self._clients.check(number, now)
                else:
                    self._membership.check(number, now)
            elif kind == "deadline":
                self._desk.deadline_passed(number, now)
            elif kind == "orphan":
                self._desk.orphaned(number)
            elif kind == "grace":
                self._desk.grace_passed(number)
            else:
                self._commands.deadline_passed(number, now)
            self._settle(now)
        self._replies.acknowledge()
        return self._take_outbox()

    def take_text_jobs(self) -> list[TextJob]:
        """Jobs to be done by `run_text_job`; each result goes to `text_done`, and more come."""
        return self._books.text_jobs.take()

    def text_done(self, result: TextResult, now: float) -> Outgoing:
        """A text job has ended."""
        self._books.text_jobs.done()
        if isinstance(result, Tokenized):
            self._submissions.tokenized(result, now)
        else:
            self._desk.detokenized(result)
        return self._take_outbox()

    def undelivered(
        self, identity: bytes, message: Message, fault: ProtocolError | None, now: float
    ) -> Outgoing:
        """A message could not be sent: it is too large (`fault`), or its peer is not there.

        An engine that cannot be reached has gone; a client gets all again with its next heartbeat.
        """
        self._books.counters.num_undelivered += 1
        peer = self._books.sessions.peer(identity)
        if fault is not None:
            self._notes.log_once(identity, f"cannot be sent a message: {fault}")
            if isinstance(message, Ack) and isinstance(peer, ClientPeer):
                self._commands.shorten_answer(peer, message.command_id)
            else:
                self._desk.unsendable(peer, message, WireError.of(fault))
        elif isinstance(peer, EnginePeer):
            self._membership.remove(peer, "it cannot be reached", now, tell=False)
        elif peer is not None:
            peer.has_missed = True
        self._settle(now)
        return self._take_outbox()

    def stood_still(self, seconds: float) -> None:
        """Its owner was stopped for so long: nobody could be heard, which is nobody's fault."""
        self._books.sessions.forgive(seconds)

    def close(self, reason: str) -> Outgoing:
        """The coordinator goes: all that is unfinished fails, and every peer is told."""
        self._commands.close(reason)
        self._desk.fail_all(WireError.of(RequestAbortedError(reason)))
        self._replies.acknowledge()
        for identity in self._books.sessions.identities():
            self._books.outbox.append((identity, Disconnect(reason=reason)))
        return self._take_outbox()

    # ---- by who sends it

    def _dispatch(self, identity: bytes, peer: Peer | None, message: Message, now: float) -> None:
        """Raises ProtocolError for what a peer may send, but not so."""
        if isinstance(peer, EnginePeer):
            peer.last_seen = now
            if type(message) in _FROM_ENGINES:
                self._from_engine(peer, message, now)
                return
        elif peer is not None:
            peer.last_seen = now
            if type(message) in _FROM_CLIENTS:
                self._from_client(peer, message, now)
                return
        elif isinstance(message, Connect):
            self._clients.connect(identity, message, now)
            return
        elif isinstance(message, Register):
            self._membership.register(identity, message, now)
            return
        else:
            self._from_stranger(identity, message, now)
            return
        self._books.counters.num_unexpected += 1
        self._notes.log_once(identity, f"sent a {type(message).__name__}, which it may not")

    def _from_engine(self, engine: EnginePeer, message: Message, now: float) -> None:
        if isinstance(message, Progress):
            for partial in message.partials():
                self._replies.progress(engine, partial)
        elif isinstance(message, EngineReplyPartial):
            self._replies.progress(engine, message)
        elif isinstance(message, EngineReply):
            self._replies.end(engine, message)
        elif isinstance(message, Heartbeat):
            self._membership.heartbeat(engine, message, now)
        elif isinstance(message, (Ack, Nack)):
            self._commands.answered(engine, message, now)
        elif isinstance(message, Register):
            self._membership.register(engine.identity, message, now)
        elif isinstance(message, Disconnect):
            reason = f"it said goodbye: {message.reason}"
            self._membership.remove(engine, reason, now, tell=False, is_fault=message.is_fault)

    def _from_client(self, client: ClientPeer, message: Message, now: float) -> None:
        if isinstance(message, SubmitRequest):
            self._submissions.submit(client, message, now)
        elif isinstance(message, ReplyAck):
            self._desk.acknowledged(client, message)
        elif isinstance(message, Heartbeat):
            self._clients.heartbeat(client, message)
        elif isinstance(message, AbortRequest):
            self._desk.abort(client, message, now)
        elif isinstance(message, (Command, UpdateWeights)):
            self._commands.submit(client, message, now)
        elif isinstance(message, Connect):
            self._clients.connect(client.identity, message, now)
        elif isinstance(message, Disconnect):
            self._clients.part(client)

    def _from_stranger(self, identity: bytes, message: Message, now: float) -> None:
        """It may be a peer that was taken for dead: say so, but not for each of its messages."""
        self._books.counters.num_strangers += 1
        name = type(message).__name__
        self._notes.log_once(identity, f"sent a {name} without having shaken hands")
        if self._notes.may_answer(identity, now):
            error = RolloutError("the coordinator does not know you; connect or register first")
            self._books.outbox.append((identity, nack_of(None, error)))

    # ---- after each call

    def _settle(self, now: float) -> None:
        """Tell the running command who has left; between commands let engines in, and go on."""
        membership, commands = self._membership, self._commands
        while commands.has_any or not membership.is_settled:
            while membership.departed:
                commands.engine_left(membership.departed.pop(0), now)
            if commands.is_busy:
                return
            membership.settle(now)
            if not commands.advance(now):
                return

    def _take_outbox(self) -> Outgoing:
        outbox, self._books.outbox = self._books.outbox, []
        return outbox
