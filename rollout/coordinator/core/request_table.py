"""RequestTable: the requests that a coordinator holds, and the phase of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from rollout.coordinator.core.sessions import ClientSession, EngineSession
from rollout.coordinator.protocol.messages import (
    Attempt,
    EngineReply,
    Sample,
    SubmitRequest,
    WireError,
)
from rollout.coordinator.protocol.token_runs import TokenRun, join_runs
from rollout.errors import ProtocolError

_NO_TOKENS = np.empty(0, np.int32)
# Runs kept apart at most: all tokens of a request are copied once for so many reports.
_MAX_RUNS = 64
# What a kept reply costs beside its record.
_REPLY_BYTES = 512


class Phase(Enum):
    """Where a request is."""

    WAITING = auto()  # for an engine
    ASSIGNED = auto()
    FINISHED = auto()  # its reply is kept for its client


class TokenGapError(ProtocolError):
    """A run that begins after the last reported token."""


class TokenLog:
    """Tokens [0, len) of one request as its engines reported them. Only grows, and never changes a
    token."""

    __slots__ = ("_num_tokens", "_runs", "num_bytes")

    def __init__(self) -> None:
        self._runs: list[TokenRun] = []
        self._num_tokens = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._num_tokens

    def append(self, run: TokenRun) -> TokenRun | None:
        """Add what is new in `run`, and return it; None if nothing is.

        Raises TokenGapError if tokens are missing before it, ProtocolError if it carries other
        values than the runs before. The log is unchanged then.
        """
        if run.offset > self._num_tokens:
            raise TokenGapError(f"tokens from {run.offset} on, but only {self._num_tokens} known")
        if run.end <= self._num_tokens:
            return None
        if self._runs and _values(self._runs[0]) != _values(run):
            raise ProtocolError("only some runs of a request have log-probs, or top-n")
        new = run.from_offset(self._num_tokens)
        self._runs.append(new)
        self._num_tokens = new.end
        self.num_bytes += num_bytes_of(new)
        if len(self._runs) > _MAX_RUNS:
            self._runs = [join_runs(self._runs)]
        return new

    def whole(self) -> TokenRun | None:
        """All tokens as one run from offset 0; None if there are none."""
        if len(self._runs) > 1:
            self._runs = [join_runs(self._runs)]
        return self._runs[0] if self._runs else None


def num_bytes_of(run: TokenRun) -> int:
    """Of the arrays of a run."""
    per_token = 20 if run.log_probs is None else 24
    return per_token * len(run) + (0 if run.top_n is None else 8 * len(run.top_n.token_ids))


def _values(run: TokenRun) -> tuple[bool, bool]:
    return run.log_probs is None, run.top_n is None


@dataclass(slots=True, eq=False)
class Group:
    """Samples of one prompt, which go to one rank. `request_ids`: the unfinished ones.

    prompt_tokens: int32 [n]. hashes: of its whole blocks. num_waiting: unfinished ones without an
    engine. num_bytes: of prompt and params, as counted for its client; 0, and no prompt, once all
    ended.
    """

    group_id: int
    prompt_tokens: npt.NDArray[np.int32]
    priority: int
    is_streaming: bool
    hashes: list[int]
    num_bytes: int = 0
    num_waiting: int = 0
    request_ids: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Request:
    """One request. `server_id` names it towards engines, `client_request_id` towards its client.

    attempt: of the latest assignment; -1 before the first. engine: who has that attempt now.
    last_engine_id: who had it last. num_known: tokens that were reported before this attempt.
    lost_attempts: those that ended with an engine that may have failed by them, since the request
    made progress last. num_tokens: prompt and new tokens it may come to, as routing counts them.
    abort_error: why it is being aborted, None if it is not; put into the reply in any case if
    `is_overdue`, else if there is no record. kept_bytes: of its reply.
    """

    server_id: int
    client: ClientSession
    client_request_id: int
    group: Group
    sampling_params: bytes
    seed: int | None
    log: TokenLog = field(default_factory=TokenLog)
    phase: Phase = Phase.WAITING
    attempt: int = -1
    engine: EngineSession | None = None
    last_engine_id: bytes | None = None
    num_known: int = 0
    lost_attempts: frozenset[int] = frozenset()
    num_tokens: int = 0
    abort_error: WireError | None = None
    is_overdue: bool = False
    reply: EngineReply | None = None
    kept_bytes: int = 0

    def current_attempt(self) -> Attempt:
        return Attempt(request_id=self.server_id, attempt=self.attempt)


class RequestTable:
    """The only writer of a request's phase, and of what its client has unfinished and kept. Ids
    count from 0 and are never used again."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.groups: dict[int, Group] = {}
        self.num_log_bytes = 0
        self._next_id = 0

    def __len__(self) -> int:
        return len(self.requests)

    def add(
        self,
        client: ClientSession,
        message: SubmitRequest,
        samples: Sequence[Sample],
        hashes: list[int],
    ) -> Group:
        """Enter these samples of a submission, waiting."""
        group = Group(
            group_id=self._next_id,
            prompt_tokens=message.prompt_tokens,
            priority=message.priority,
            is_streaming=message.streaming,
            hashes=hashes,
            num_bytes=message.prompt_tokens.nbytes
            + sum(len(s.sampling_params) for s in message.samples),
            num_waiting=len(samples),
        )
        self.groups[group.group_id] = group
        for sample in samples:
            request = Request(
                server_id=self._next_id,
                client=client,
                client_request_id=sample.request_id,
                group=group,
                sampling_params=sample.sampling_params,
                seed=sample.seed,
            )
            self._next_id += 1
            self.requests[request.server_id] = request
            client.server_ids[request.client_request_id] = request.server_id
            group.request_ids[request.server_id] = None
        client.num_unfinished += len(samples)
        client.request_bytes += group.num_bytes
        return group

    def assign(self, request: Request, engine: EngineSession) -> None:
        """WAITING -> ASSIGNED, by another attempt."""
        request.attempt += 1
        request.num_known = len(request.log)
        request.last_engine_id = engine.engine_id
        engine.num_assigned += 1
        self.reclaim(request, engine)

    def reclaim(self, request: Request, engine: EngineSession) -> None:
        """WAITING -> ASSIGNED, by the attempt that the engine has."""
        assert request.phase is Phase.WAITING
        request.phase, request.engine = Phase.ASSIGNED, engine
        request.group.num_waiting -= 1
        engine.server_ids[request.server_id] = None

    def requeue(self, request: Request) -> None:
        """ASSIGNED -> WAITING: its engine has it no more."""
        self._leave_engine(request)
        request.phase = Phase.WAITING
        request.group.num_waiting += 1

    def finish(self, request: Request, reply: EngineReply) -> None:
        """-> FINISHED, with the reply under the client's name for it."""
        self._end(request)
        request.phase, request.sampling_params = Phase.FINISHED, b""
        self.replace_reply(request, reply)

    def replace_reply(self, request: Request, reply: EngineReply) -> None:
        request.client.kept_bytes -= request.kept_bytes
        request.reply = reply
        request.kept_bytes = _REPLY_BYTES + len(reply.record or b"")
        request.client.kept_bytes += request.kept_bytes

    def forget(self, request: Request) -> None:
        """Nothing more will be asked about it."""
        if request.phase is not Phase.FINISHED:
            self._end(request)
        del self.requests[request.server_id]
        del request.client.server_ids[request.client_request_id]
        request.client.kept_bytes -= request.kept_bytes

    def log_tokens(self, request: Request, run: TokenRun) -> TokenRun | None:
        """Add what is new to the request's log; as TokenLog.append."""
        before = request.log.num_bytes
        new = request.log.append(run)
        self.num_log_bytes += request.log.num_bytes - before
        return new

    def waiting(self, group: Group) -> list[Request]:
        """The group's requests that have no engine."""
        members = [self.requests[server_id] for server_id in group.request_ids]
        return [request for request in members if request.phase is Phase.WAITING]

    def assigned(self, engine: EngineSession) -> list[Request]:
        """The engine's requests, oldest first."""
        return [self.requests[server_id] for server_id in engine.server_ids]

    def _leave_engine(self, request: Request) -> None:
        if request.engine is not None:
            del request.engine.server_ids[request.server_id]
            request.engine = None

    def _end(self, request: Request) -> None:
        """Take an unfinished request from its engine and its group."""
        group = request.group
        self._leave_engine(request)
        group.num_waiting -= request.phase is Phase.WAITING
        self.num_log_bytes -= request.log.num_bytes
        request.log = TokenLog()
        request.client.num_unfinished -= 1
        del group.request_ids[request.server_id]
        if not group.request_ids:
            del self.groups[group.group_id]
            # A kept reply has its group, but needs nothing of it.
            group.prompt_tokens, group.hashes = _NO_TOKENS, []
            request.client.request_bytes -= group.num_bytes
            group.num_bytes = 0
