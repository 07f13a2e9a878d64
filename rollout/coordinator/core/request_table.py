"""RequestTable: the requests that a coordinator holds, and the sessions of clients and engines.

Used by the other modules of `rollout.coordinator.core`, which change sessions by the sessions' own
methods. RequestTable assigns and ends requests. All state is kept in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rollout.control.state import EngineState
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    Ack,
    Attempt,
    Credit,
    EngineReply,
    EngineReplyPartial,
    EngineStatus,
    Nack,
    ReplyAck,
    Sample,
    SubmitRequest,
    WireError,
    in_parts,
)
from rollout.errors import ProtocolError
from rollout.requests.token_runs import TokenRun, join_runs
from rollout.wire import Message

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_NO_TOKENS = np.empty(0, np.int32)
# Most runs that are kept apart: joining them copies all tokens of a request.
_MAX_RUNS = 64
# Estimated memory of a kept reply besides its record.
_REPLY_BYTES = 512


class Recent(OrderedDict[K, V]):
    """A dictionary of at most `max_items` entries. A further entry drops the oldest one."""

    # A plain dict would pass over all deleted entries to find its first key.
    def __init__(self, max_items: int) -> None:
        super().__init__()
        self._max_items = max_items

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._max_items:
            self.popitem(last=False)


# ---- sessions of peers


@dataclass(slots=True, eq=False)
class ClientSession:
    """One client, until it disconnects or its lease runs out. Only its own methods change it.

    identity: identity of the client's latest connection.
    requests: unfinished requests and requests with a kept reply, by the client's request ids.
    request_bytes: bytes of prompts and params of unfinished requests.
    kept_bytes: bytes of kept replies.
    answered: ids of acknowledged requests.
    answers: answers to commands by command id; None while a command waits or runs.
    missed_tokens: offset of the first undelivered token, by request id.
    missed_answers: ids of commands whose answer was not delivered."""

    client_id: bytes
    identity: bytes
    name: str
    last_seen: float
    answered: Recent[int, None]
    requests: dict[int, Request] = field(default_factory=dict)
    num_unfinished: int = 0
    request_bytes: int = 0
    kept_bytes: int = 0
    answers: OrderedDict[int, Ack | Nack | None] = field(default_factory=OrderedDict)
    missed_tokens: dict[int, int] = field(default_factory=dict)
    missed_answers: dict[int, None] = field(default_factory=dict)
    has_left: bool = False

    def renew_lease(self, now: float) -> None:
        """Begin the lease again at `now`, when a message has arrived."""
        self.last_seen = now

    def extend_lease(self, seconds: float) -> None:
        self.last_seen += seconds

    def move(self, identity: bytes) -> None:
        """Use another connection, and mark all messages to the earlier connection as
        undelivered."""
        self.identity = identity
        self.missed_answers = dict.fromkeys(self.answers)
        self.missed_tokens = dict.fromkeys(self.requests, 0)

    def leave(self) -> None:
        """End the session. No further command answers are sent to the client."""
        self.has_left = True

    # ---- its requests, which RequestTable adds and ends

    def add(self, requests: Iterable[Request], num_bytes: int) -> None:
        """Add the unfinished requests of a group. `num_bytes` counts the group's prompt and
        params."""
        for request in requests:
            self.requests[request.client_request_id] = request
            self.num_unfinished += 1
        self.request_bytes += num_bytes

    def finish_request(self) -> None:
        self.num_unfinished -= 1

    def finish_group(self, num_bytes: int) -> None:
        """Subtract the bytes of a group whose requests have all ended."""
        self.request_bytes -= num_bytes

    def count_kept_bytes(self, num_bytes: int) -> None:
        """Add the bytes of a kept reply. The number is negative for a dropped reply."""
        self.kept_bytes += num_bytes

    def remove(self, request: Request) -> None:
        del self.requests[request.client_request_id]

    def acknowledge(self, request_id: int) -> None:
        """Record that the reply of a request has arrived at the client."""
        self.answered[request_id] = None
        self.missed_tokens.pop(request_id, None)

    # ---- its commands

    def begin_command(self, command_id: int) -> None:
        """Record a command id, so that a repeated message does not run the command again."""
        self.answers[command_id] = None

    def keep_answer(self, command_id: int, answer: Ack | Nack, max_answers: int) -> None:
        """Keep the answer to a command, and drop the oldest answers beyond `max_answers`."""
        self.answers[command_id] = answer
        num_over = len(self.answers) - max_answers
        for old_id in list(self.answers)[: max(num_over, 0)]:
            if self.answers[old_id] is not None:
                del self.answers[old_id]

    # ---- messages that were not delivered

    def miss(self, message: Message) -> None:
        """Record an undelivered message until `take_missed`."""
        if isinstance(message, (Ack, Nack)) and message.command_id is not None:
            self.missed_answers[message.command_id] = None
        elif isinstance(message, EngineReply):
            self.missed_tokens[message.request_id] = 0
        elif isinstance(message, EngineReplyPartial):
            offset = self.missed_tokens.get(message.request_id, message.tokens.offset)
            self.missed_tokens[message.request_id] = min(offset, message.tokens.offset)

    def take_missed(self) -> tuple[list[Ack | Nack], dict[int, int]]:
        """Return the undelivered answers, and the first undelivered token's offset by request id.
        Acknowledged requests are left out. Clears both records."""
        answers = [answer for i in self.missed_answers if (answer := self.answers.get(i))]
        tokens = {i: offset for i, offset in self.missed_tokens.items() if i in self.requests}
        self.missed_answers, self.missed_tokens = {}, {}
        return answers, tokens

    def __str__(self) -> str:
        return f"client {self.client_id.hex()[:8]} {self.name!r}"


@dataclass(slots=True, eq=False)
class EngineSession:
    """One registered engine. It gets requests and most commands only while `is_ready`. Only its own
    methods change it.

    session: number of this registration, which the engine's Credit messages repeat.
    max_held: most requests that are assigned to the engine at a time.
    num_granted: requests that the engine accepts, counted since it registered.
    num_assigned: requests that were sent to the engine, counted since it registered.
    last_seen: time of the engine's last frame.
    progress_at: time when the engine's step count last rose, or when it last had no work.
    requests: requests assigned to the engine, oldest first.
    last_chance_id: id of a request that fails if this engine fails. An engine has at most one.
    expected: state and weights version that the RegisterAck named.
    num_awaited: number of commands that wait for the engine's answer.
    acknowledged: queue of attempts whose replies have arrived.
    aborted: queue of attempts to abort."""

    engine_id: bytes
    identity: bytes
    rank: int
    weights_version: int
    max_held: int
    last_seen: float
    progress_at: float
    session: int
    expected: tuple[str, int]
    num_granted: int = 0
    num_assigned: int = 0
    status: EngineStatus | None = None
    is_ready: bool = False
    num_awaited: int = 0
    requests: dict[int, Request] = field(default_factory=dict)
    last_chance_id: int | None = None
    acknowledged: list[Attempt] = field(default_factory=list)
    aborted: list[Attempt] = field(default_factory=list)

    # ---- its lease and state

    def renew_lease(self, now: float) -> None:
        """Begin the lease again at `now`, when a message has arrived."""
        self.last_seen = now

    def extend_lease(self, seconds: float) -> None:
        """Lengthen the lease and the progress deadline."""
        self.last_seen += seconds
        self.progress_at += seconds

    def report(self, status: EngineStatus, now: float) -> None:
        """Keep the status of a heartbeat. Until the engine is ready, also keep its weights
        version."""
        before, self.status = self.status, status
        has_stepped = before is None or status.num_steps != before.num_steps
        if has_stepped or not self.is_stepping or not self.is_ready:
            self.progress_at = now
        if not self.is_ready:
            self.weights_version = status.weights_version

    def begin_work(self, now: float) -> None:
        """Make the engine ready. Restart the progress deadline at `now`."""
        self.is_ready, self.progress_at = True, now

    def end_work(self) -> None:
        self.is_ready = False

    def serve(self, version: int) -> None:
        """Set the weights version that the engine has confirmed."""
        self.weights_version = version

    def begin_command(self) -> None:
        """Count a command that may stop the engine's steps until `end_command`."""
        self.num_awaited += 1

    def end_command(self, now: float) -> None:
        """Undo `begin_command` after the engine's answer. Restart the progress deadline at
        `now`."""
        self.num_awaited -= 1
        self.progress_at = now

    # ---- its requests, which RequestTable adds and removes

    def grant(self, credit: Credit) -> bool:
        """Keep the number of requests that the engine accepts. Returns False if the credit belongs
        to an earlier registration."""
        if credit.session != self.session:
            return False
        self.num_granted = credit.num_granted
        return True

    def assign(self, request: Request) -> None:
        """Add a request that is sent to the engine, and count it against the engine's credit."""
        self.num_assigned += 1
        self.requests[request.server_id] = request

    def reclaim(self, request: Request) -> None:
        """Add a request that the engine already had when it registered."""
        self.requests[request.server_id] = request

    def withdraw(self) -> None:
        """Undo the count of `assign` for a request that was not sent."""
        self.num_assigned -= 1

    def remove(self, request: Request) -> None:
        del self.requests[request.server_id]

    def begin_last_chance(self, request: Request) -> None:
        """Mark the request that fails if this engine fails."""
        self.last_chance_id = request.server_id

    def end_last_chance(self, request: Request) -> None:
        """Remove the mark of `begin_last_chance` if this request has it."""
        if self.last_chance_id == request.server_id:
            self.last_chance_id = None

    def acknowledge(self, attempt: Attempt) -> None:
        """Queue an acknowledgement of the attempt's reply."""
        self.acknowledged.append(attempt)

    def abort(self, attempt: Attempt) -> None:
        """Queue an abort of the attempt."""
        self.aborted.append(attempt)

    def take_queued(self) -> Sequence[ReplyAck | AbortRequest]:
        """Return the queued acknowledgements and aborts as messages, and clear both queues."""
        if not self.acknowledged and not self.aborted:
            return ()
        acknowledged, self.acknowledged = self.acknowledged, []
        aborted, self.aborted = self.aborted, []
        return [
            *(ReplyAck(attempts=attempts) for attempts in in_parts(acknowledged)),
            *(AbortRequest(attempts=attempts) for attempts in in_parts(aborted)),
        ]

    # ---- what follows from its state

    @property
    def has_room(self) -> bool:
        """Whether the engine is ready and accepts another request."""
        has_credit = self.num_granted > self.num_assigned
        return self.is_ready and has_credit and len(self.requests) < self.max_held

    @property
    def is_stepping(self) -> bool:
        """Whether the engine runs and has work, according to its latest heartbeat."""
        status = self.status
        if status is None or status.state != EngineState.RUNNING.name:
            return False
        return status.num_waiting + status.num_running > 0

    @property
    def longest_step_s(self) -> float:
        """Seconds of the engine's longest step, according to its latest heartbeat; 0 if unknown."""
        return 0.0 if self.status is None else self.status.longest_step_s

    def __str__(self) -> str:
        return f"rank {self.rank} (engine {self.engine_id.hex()[:8]})"


Session = ClientSession | EngineSession


# ---- requests


class TokenGapError(ProtocolError):
    """Tokens between the known tokens and a new run are missing."""


class TokenLog:
    """The tokens of one request from offset 0, as engines have reported them."""

    __slots__ = ("_num_tokens", "_runs", "num_bytes")

    def __init__(self) -> None:
        self._runs: list[TokenRun] = []
        self._num_tokens = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._num_tokens

    def append(self, run: TokenRun) -> TokenRun | None:
        """Add the new tokens of `run`. Returns them as a run, or None if `run` has no new token.
        Raises TokenGapError if tokens before `run` are missing. Raises ProtocolError if only some
        runs have log-probs, ranks or top-n. Errors leave the log unchanged."""
        if run.offset > self._num_tokens:
            raise TokenGapError(f"tokens from {run.offset} on, but only {self._num_tokens} known")
        if run.end <= self._num_tokens:
            return None
        first = self._runs[0] if self._runs else run
        if _absent_columns(first) != _absent_columns(run):
            raise ProtocolError("only some runs of a request have log-probs, ranks or top-n")
        new = run.from_offset(self._num_tokens)
        self._runs.append(new)
        self._num_tokens = new.end
        self.num_bytes += num_bytes_of(new)
        if len(self._runs) > _MAX_RUNS:
            self._runs = [join_runs(self._runs)]
        return new

    def whole(self) -> TokenRun | None:
        """Return all tokens as one run, or None for an empty log."""
        if len(self._runs) > 1:
            self._runs = [join_runs(self._runs)]
        return self._runs[0] if self._runs else None


def _absent_columns(run: TokenRun) -> tuple[bool, bool, bool]:
    return run.log_probs is None, run.ranks is None, run.top_n is None


def num_bytes_of(run: TokenRun) -> int:
    """Estimate the bytes in the arrays of `run`."""
    per_token = 20 + 4 * (run.log_probs is not None) + 4 * (run.ranks is not None)
    return per_token * len(run) + (0 if run.top_n is None else 8 * len(run.top_n.token_ids))


@dataclass(slots=True, eq=False)
class Group:
    """Samples of one prompt, which are assigned to one rank together.

    prompt_tokens: int32 [n]; empty once all samples have ended.
    hashes: hashes of the prompt's whole blocks; empty once all samples have ended.
    num_bytes: bytes of prompt and params.
    unfinished: unfinished requests by server id.
    waiting: unfinished requests without an engine, by server id."""

    group_id: int
    prompt_tokens: npt.NDArray[np.int32]
    priority: int
    is_streaming: bool
    hashes: list[int]
    num_bytes: int
    unfinished: dict[int, Request] = field(default_factory=dict)
    waiting: dict[int, Request] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Request:
    """One sample of a client. It waits, then has an `engine`, and has ended once it has a `reply`.

    server_id: id in messages to engines.
    client_request_id: id in messages to the client.
    num_tokens: most prompt and new tokens that the request can have.
    attempt: number of the latest assignment to an engine; -1 before the first.
    last_engine_id: engine of the latest assignment.
    num_known: number of tokens that were reported before the latest assignment.
    lost_attempts: attempts whose engine failed, perhaps because of this request. New tokens clear
        it.
    abort_error: error of the abort; None unless the request is being aborted. The reply has this
        error if the engine sends no reply.
    is_overdue: whether the deadline has passed. `abort_error` then replaces a failed reply's
        error."""

    server_id: int
    client: ClientSession
    client_request_id: int
    group: Group
    sampling_params: bytes
    seed: int | None
    num_tokens: int
    log: TokenLog
    engine: EngineSession | None = None
    reply: EngineReply | None = None
    attempt: int = -1
    last_engine_id: bytes | None = None
    num_known: int = 0
    lost_attempts: frozenset[int] = frozenset()
    abort_error: WireError | None = None
    is_overdue: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether the request is unfinished and has no engine."""
        return self.server_id in self.group.waiting

    def current_attempt(self) -> Attempt:
        """Return the latest attempt, named by `server_id` as in messages to engines."""
        return Attempt(request_id=self.server_id, attempt=self.attempt)


class RequestTable:
    """All requests by server id, and all unfinished groups by group id. Only this class assigns and
    ends requests. Ids rise from 0 and are never reused. num_log_bytes counts the bytes of all token
    logs."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.groups: dict[int, Group] = {}
        self.num_log_bytes = 0
        self._next_id = 0

    def add(
        self,
        client: ClientSession,
        message: SubmitRequest,
        samples: Sequence[Sample],
        hashes: list[int],
        num_tokens: Sequence[int],
    ) -> Group:
        """Add samples of a submission as waiting requests, and return their group. `num_tokens`
        holds the most tokens of each sample, in the order of `samples`."""
        num_bytes = message.prompt_tokens.nbytes
        for sample in message.samples:
            num_bytes += len(sample.sampling_params)
        group_id = self._next_id
        group = Group(
            *(group_id, message.prompt_tokens, message.priority, message.streaming),
            *(hashes, num_bytes),
        )
        self.groups[group_id] = group
        for server_id, sample in enumerate(samples, group_id):
            self.requests[server_id] = group.waiting[server_id] = Request(
                *(server_id, client, sample.request_id, group),
                *(sample.sampling_params, sample.seed, num_tokens[server_id - group_id]),
                TokenLog(),
            )
        group.unfinished.update(group.waiting)
        self._next_id += len(samples)
        client.add(group.waiting.values(), num_bytes)
        return group

    def assign(self, request: Request, engine: EngineSession) -> None:
        """Assign a waiting request to an engine as a new attempt."""
        request.attempt += 1
        request.num_known = len(request.log)
        request.last_engine_id = engine.engine_id
        del request.group.waiting[request.server_id]
        request.engine = engine
        engine.assign(request)

    def reclaim(self, request: Request, engine: EngineSession) -> None:
        """Assign a waiting request to the engine that has its latest attempt."""
        del request.group.waiting[request.server_id]
        request.engine = engine
        engine.reclaim(request)

    def requeue(self, request: Request) -> None:
        """Make an assigned request wait again, since its engine has left."""
        self._leave_engine(request)
        request.group.waiting[request.server_id] = request

    def finish(self, request: Request, reply: EngineReply) -> None:
        """End an unfinished request with `reply`."""
        self._end(request)
        request.sampling_params = b""
        self.replace_reply(request, reply)

    def replace_reply(self, request: Request, reply: EngineReply) -> None:
        """Keep `reply` in place of an earlier reply."""
        request.client.count_kept_bytes(_kept_bytes(reply) - _kept_bytes(request.reply))
        request.reply = reply

    def remove(self, request: Request) -> None:
        """Remove a request and its reply. Ends the request if it is unfinished."""
        if request.reply is None:
            self._end(request)
        del self.requests[request.server_id]
        request.client.remove(request)
        request.client.count_kept_bytes(-_kept_bytes(request.reply))

    def log_tokens(self, request: Request, run: TokenRun) -> TokenRun | None:
        """Add new tokens to the request's log. Returns the new tokens as a run, or None if there
        are none. Raises the errors of TokenLog.append."""
        before = request.log.num_bytes
        new = request.log.append(run)
        self.num_log_bytes += request.log.num_bytes - before
        return new

    def _leave_engine(self, request: Request) -> None:
        if request.engine is not None:
            request.engine.remove(request)
            request.engine = None

    def _end(self, request: Request) -> None:
        """Remove an unfinished request from its engine and its group, and drop its token log."""
        group, client = request.group, request.client
        self._leave_engine(request)
        group.waiting.pop(request.server_id, None)
        del group.unfinished[request.server_id]
        client.finish_request()
        if len(request.log):
            self.num_log_bytes -= request.log.num_bytes
            request.log = TokenLog()
        if not group.unfinished:
            del self.groups[group.group_id]
            # A kept reply still refers to its group, but does not need these.
            group.prompt_tokens, group.hashes = _NO_TOKENS, []
            client.finish_group(group.num_bytes)


def _kept_bytes(reply: EngineReply | None) -> int:
    return 0 if reply is None else _REPLY_BYTES + len(reply.record or b"")
