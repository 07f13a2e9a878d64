"""The requests that a coordinator holds: unfinished ones, and replies kept for their client."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from rollout.coordinator.core.sessions import ClientPeer, EnginePeer
from rollout.coordinator.core.token_log import TokenLog
from rollout.coordinator.protocol.messages import EngineReply, WireError

_NO_TOKENS = np.empty(0, np.int32)


class Phase(Enum):
    """Where a request is. An attempt counts from its assignment until the next one."""

    TOKENIZING = auto()
    WAITING = auto()  # for an engine
    ASSIGNED = auto()
    DETOKENIZING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Group:
    """Samples of one prompt, which go to one rank. `request_ids`: the unfinished ones.

    prompt: its text, if it came as text. prompt_tokens: int32 [n]. hashes: of its whole blocks.
    num_bytes: of prompt and params, as counted for its client; 0, and no prompt, once all ended.
    """

    group_id: int
    prompt: str | None
    prompt_tokens: npt.NDArray[np.int32]
    priority: int
    is_streaming: bool
    num_bytes: int = 0
    hashes: list[int] = field(default_factory=list)
    request_ids: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Request:
    """One request. `server_id` names it towards engines, `client_request_id` towards its client.

    attempt: of the latest assignment; -1 before the first. engine: who has that attempt now.
    last_engine_id: who had it last. lost_attempts: those that ended with their engine.
    num_tokens: prompt and new tokens it may come to, as routing counted them. abort_error: why it
    is being aborted, None if it is not; put into the reply in any case if `is_overdue`, else if
    there is no record. kept_bytes: of its reply.
    """

    server_id: int
    client: ClientPeer
    client_request_id: int
    group: Group
    sampling_params: bytes
    seed: int | None
    log: TokenLog
    phase: Phase = Phase.WAITING
    attempt: int = -1
    engine: EnginePeer | None = None
    last_engine_id: bytes | None = None
    lost_attempts: frozenset[int] = frozenset()
    num_tokens: int = 0
    abort_error: WireError | None = None
    is_overdue: bool = False
    reply: EngineReply | None = None
    kept_bytes: int = 0


class RequestTable:
    """Requests and groups by id. Ids count from `first_id` on and are never used again."""

    def __init__(self, first_id: int) -> None:
        self.first_id = first_id
        self.requests: dict[int, Request] = {}
        self.groups: dict[int, Group] = {}
        self.waiting_groups: dict[int, None] = {}  # in order; those with a WAITING request
        self._next_id = first_id

    def __len__(self) -> int:
        return len(self.requests)

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def add(self, request: Request) -> None:
        self.requests[request.server_id] = request
        request.client.server_ids[request.client_request_id] = request.server_id
        self.groups[request.group.group_id] = request.group
        request.group.request_ids[request.server_id] = None

    def leave_group(self, request: Request) -> None:
        """The request has ended; a group without requests is forgotten."""
        group = request.group
        group.request_ids.pop(request.server_id, None)
        if not group.request_ids:
            self.groups.pop(group.group_id, None)
            self.waiting_groups.pop(group.group_id, None)
            # A kept reply has its group, but needs nothing of it.
            group.prompt, group.prompt_tokens, group.hashes = None, _NO_TOKENS, []
            request.client.request_bytes -= group.num_bytes
            group.num_bytes = 0

    def forget(self, request: Request) -> None:
        """Nothing more will be asked about it."""
        self.leave_group(request)
        del self.requests[request.server_id]
        del request.client.server_ids[request.client_request_id]
        request.client.kept_bytes -= request.kept_bytes

    def members(self, group: Group, phase: Phase) -> list[Request]:
        """The group's requests in one phase."""
        members = [self.requests[server_id] for server_id in group.request_ids]
        return [request for request in members if request.phase is phase]
