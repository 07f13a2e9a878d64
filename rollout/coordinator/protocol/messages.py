"""The messages between clients, the coordinator and engines.

Used by `rollout.coordinator.agent`, `rollout.coordinator.client`, `rollout.coordinator.core`,
`rollout.coordinator.net.link`, and the other modules of `rollout.coordinator.protocol`. Each
message is sent as one msgpack array, [header, field, ...]: see docs/protocol.md.

Messages name a request by (request_id, attempt). Between client and coordinator the client chooses
the id, and the attempt is 0. Between coordinator and engine the coordinator chooses the id, and
each assignment of the request is another attempt. The coordinator replaces the name in messages
that it forwards. Times are durations in seconds, because peers share no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Annotated, Any

from msgspec import Meta, field

from rollout import errors
from rollout.control.commands import COMMANDS, ControlMessage, FleetResults
from rollout.control.reports import WeightUpdateReport
from rollout.control.state import UPDATE_WEIGHTS
from rollout.errors import ProtocolError, RolloutError, decode_error, encode_error, utf8_text
from rollout.requests.token_runs import TokenRun, TokenRuns
from rollout.weights.source import WeightsSource
from rollout.wire import (
    MAX_ITEMS,
    MAX_PLAIN_BYTES,
    Count,
    Int,
    Message,
    Name,
    PlainMap,
    Seconds,
    Seed,
    TokenIds,
    Uuid,
    Version,
    WireData,
    WithColumns,
    check_plain,
)

# Increase it with any change of a header or field. Peers of different versions refuse each other.
PROTOCOL_VERSION = 10


class Headers(IntEnum):
    """The header of each message. Headers below 70 belong to the public interface."""

    CONNECT = 0
    CONNECT_ACK = 1
    SUBMIT_REQUEST = 20
    ENGINE_REPLY = 21
    ENGINE_REPLY_PARTIAL = 22
    ABORT_REQUEST = 23
    PAUSE = 40
    UNPAUSE = 41
    SUSPEND = 42
    RESUME = 43
    SET_GENERATION_EPOCH = 44
    STOP = 45
    INCREMENT_STALENESS = 46
    DISCONNECT = 60
    SHUTDOWN = 61
    ACK = 70
    NACK = 71
    HEARTBEAT = 72
    REGISTER = 73
    REGISTER_ACK = 74
    ASSIGN_REQUEST = 75
    REPLY_ACK = 76
    UPDATE_WEIGHTS = 77
    PREPARE = 78
    COMMIT = 79
    ROLLBACK = 80
    STATS = 81
    CREDIT = 82
    PROGRESS = 83
    BATCH = 84
    CHECKSUMS = 85


# ---- parts of messages


MAX_SAMPLES = 2**16  # of one prompt, in one message
_MAX_REASON = 1000
_MAX_ERROR_MESSAGE = 2**16
Settings = Annotated[Mapping[Name, Name], Meta(max_length=1024)]


class Attempt(WireData, frozen=True, kw_only=True):
    """One assignment of one request. The attempt with the largest number is the current one."""

    request_id: Count
    attempt: Count = 0


class Sample(WireData, frozen=True, kw_only=True):
    """One request of a group.

    sampling_params: packed by `pack_params`. The coordinator reads only the token limits in them.
    seed: seed that the client chose. None takes the seed in `sampling_params`. If that has none,
        the engine derives a seed.
    resumed: all tokens of earlier attempts, from offset 0; None for a new request."""

    request_id: Count
    attempt: Count = 0
    sampling_params: Annotated[bytes, Meta(max_length=MAX_PLAIN_BYTES)]
    seed: Seed | None = None
    resumed: TokenRun | None = None

    def __post_init__(self) -> None:
        if self.resumed is not None and self.resumed.offset:
            raise ProtocolError(f"Sample: resumed tokens start at {self.resumed.offset}, not 0")


Attempts = Annotated[tuple[Attempt, ...], Meta(max_length=MAX_ITEMS)]
Samples = Annotated[tuple[Sample, ...], Meta(min_length=1, max_length=MAX_SAMPLES)]


def in_parts(attempts: Sequence[Attempt]) -> Iterator[tuple[Attempt, ...]]:
    """Yield the attempts in parts of at most MAX_ITEMS, the limit of one message."""
    for start in range(0, len(attempts), MAX_ITEMS):
        yield tuple(attempts[start : start + MAX_ITEMS])


class EngineStatus(WireData, frozen=True, kw_only=True):
    """State of an engine at a heartbeat. A rising `num_steps` shows progress.

    longest_step_s: estimated seconds of the engine's longest step; 0 before a step was timed."""

    state: Name
    num_steps: Count
    num_waiting: Count
    num_running: Count
    weights_version: Version
    longest_step_s: Seconds = 0.0


class WireError(WireData, frozen=True, kw_only=True):
    """An error in a message. `type_name` is the name of the error's class."""

    type_name: Name
    message: str | None
    is_transient: bool = False
    request_id: Count | None = None

    @classmethod
    def of(cls, error: BaseException) -> WireError:
        """Return `error` as a WireError. A long message is cut. A subclass of a class in
        `rollout.errors` is sent under the name of that class."""
        encoded = encode_error(error)
        if isinstance(error, RolloutError) and encoded["type"] == type(error).__name__:
            public = (base for base in type(error).__mro__ if base.__module__ == errors.__name__)
            encoded["type"] = next(public).__name__
        return cls(
            type_name=encoded["type"],
            message=encoded["message"] and encoded["message"][:_MAX_ERROR_MESSAGE],
            is_transient=encoded["is_transient"],
            request_id=encoded.get("request_id"),
        )

    def to_error(self) -> RolloutError:
        """Return the error to raise. An unknown class becomes a RemoteError."""
        encoded: dict[str, Any] = {
            "type": self.type_name,
            "message": self.message,
            "is_transient": self.is_transient,
            "request_id": self.request_id,
        }
        return decode_error(encoded)


# ---- sessions: handshakes, heartbeats, disconnects


class Connect(Message, frozen=True, kw_only=True, tag=0):
    """Client -> coordinator: the first message of a session.

    client_id: uuid that stays the same after a reconnect.
    name: client's name in log messages."""

    protocol_version: Count = PROTOCOL_VERSION
    client_id: Uuid
    name: Name = ""


class ConnectAck(Message, frozen=True, kw_only=True, tag=1):
    """Coordinator -> client: the client is accepted.

    state: name of the fleet's state.
    lease_s: seconds of silence after which the coordinator ends the session.
    heartbeat_s: seconds between two heartbeats.
    answer_grace_s: seconds after the deadline of a request or command in which an answer may come.
    max_requests, max_request_bytes: limits of one client's unfinished requests.
    is_resumed: whether the coordinator still knows the client and its requests."""

    protocol_version: Count = PROTOCOL_VERSION
    coordinator_id: Uuid
    state: Name
    data_parallel_size: Count
    weights_version: Version
    lease_s: Seconds
    heartbeat_s: Seconds
    answer_grace_s: Seconds
    max_requests: Count = 2**16
    max_request_bytes: Count = 2**30
    is_resumed: bool = False


class Register(Message, frozen=True, kw_only=True, tag=73):
    """Engine -> coordinator: the first message of a session.

    engine_id: uuid that stays the same for the life of the process.
    state: name of the engine's state.
    running: attempts that the engine holds, including ended ones.
    prepared_command_id: id of a Prepare that the engine has voted yes to, and that was neither
        committed nor rolled back. The answer is then a RegisterAck with weights to fetch, or a
        RegisterAck followed by a Rollback.
    settings: settings that must be equal on all engines, as text by name."""

    protocol_version: Count = PROTOCOL_VERSION
    engine_id: Uuid
    state: Name
    weights_version: Version
    weights_checksum: Name
    block_size_tokens: Count
    max_requests: Count
    running: Attempts = ()
    prepared_command_id: Count | None = None
    settings: Settings = field(default_factory=dict)


class RegisterAck(Message, frozen=True, kw_only=True, tag=74):
    """Coordinator -> engine: the engine is accepted.

    state: name of the state that the engine must enter before it gets work.
    lease_s: seconds without an answered heartbeat after which the engine stops stepping.
    heartbeat_s: seconds between two heartbeats.
    report_interval_tokens: most tokens of a request between two Progress messages.
    weights: where to fetch the weights of `weights_version`; None if the engine has these weights,
        or must wait for a push because no copy is kept.
    keep: attempts that the engine keeps. The engine drops all other attempts.
    session: number of this registration, which the engine's Credit messages repeat.
    base_weights: full weights below `weights` if that is an adapter; None for the engines' initial
        weights."""

    coordinator_id: Uuid
    state: Name
    lease_s: Seconds
    heartbeat_s: Seconds
    report_interval_tokens: Count
    weights_version: Version
    weights: WeightsSource | None = None
    keep: Attempts = ()
    session: Count = 0
    base_weights: WeightsSource | None = None


class Heartbeat(Message, frozen=True, kw_only=True, tag=72):
    """Both directions: the sender is alive. Only engines send a `status`.

    The coordinator answers each heartbeat with the same `sequence`. The answer renews the sender's
    lease from the time when the heartbeat was sent. The coordinator also sends heartbeats of
    sequence 0, which peers do not answer."""

    sequence: Count
    status: EngineStatus | None = None


class Credit(Message, frozen=True, kw_only=True, tag=82):
    """Engine -> coordinator: the engine accepts `num_granted` requests, counted since it
    registered.

    `num_granted` never falls. The engine's room is `num_granted` minus the number of assigned
    requests, even while messages are in flight. `session` is the number in the engine's
    RegisterAck. The coordinator drops credit of an earlier session."""

    num_granted: Count
    session: Count = 0


class Disconnect(Message, frozen=True, kw_only=True, tag=60):
    """Both directions: the sender ends the session for `reason`.

    is_fault: whether the sender failed.
    suspects: attempts in the failed step. The failure counts only against their requests."""

    reason: Name = ""
    is_fault: bool = False
    suspects: Attempts = ()

    @classmethod
    def because(
        cls, reason: str, *, is_fault: bool = False, suspects: Sequence[Attempt] = ()
    ) -> Disconnect:
        """Return a Disconnect. A long `reason` is cut."""
        text = utf8_text(reason)[:_MAX_REASON]
        return cls(reason=text, is_fault=is_fault, suspects=tuple(suspects))


# ---- requests and their replies


class SubmitRequest(Message, WithColumns, frozen=True, kw_only=True, tag=20):
    """Client -> coordinator: samples of one prompt, which go to one engine. A known request id is
    not accepted again.

    prompt_tokens: int32 [n].
    priority: higher priorities come first.
    deadline_s: seconds from arrival; None for no limit.
    streaming: whether the client gets EngineReplyPartial messages."""

    samples: Samples
    prompt_tokens: TokenIds
    priority: Int = 0
    deadline_s: Seconds | None = None
    streaming: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_names("SubmitRequest", self.samples)
        for sample in self.samples:
            if sample.attempt or sample.resumed is not None:
                raise ProtocolError("SubmitRequest: a client's sample is attempt 0, not resumed")


class AssignRequest(Message, WithColumns, frozen=True, kw_only=True, tag=75):
    """Coordinator -> engine: run these samples of one prompt. `prompt_tokens` are int32 [n]."""

    samples: Samples
    prompt_tokens: TokenIds
    priority: Int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_names("AssignRequest", self.samples)


class EngineReplyPartial(Message, frozen=True, kw_only=True, tag=22):
    """Coordinator -> client: new tokens of a streamed request."""

    request_id: Count
    tokens: TokenRun


class Progress(Message, frozen=True, kw_only=True, tag=83):
    """Engine -> coordinator: tokens of many attempts that were not reported before."""

    runs: TokenRuns


class EngineReply(Message, frozen=True, kw_only=True, tag=21):
    """Engine -> coordinator -> client: the end of a request.

    The sender keeps the reply until it gets a ReplyAck. A refusal of a submission is not kept.

    record: packed by `pack_record`; None if there is only an `error`.
    is_failed: whether the request's status is FAILED."""

    request_id: Count
    attempt: Count = 0
    record: bytes | None = None
    error: WireError | None = None
    is_failed: bool = False

    def __post_init__(self) -> None:
        if self.record is None and (self.error is None or not self.is_failed):
            raise ProtocolError("EngineReply: without a record it needs an error and is_failed")


class ReplyAck(Message, frozen=True, kw_only=True, tag=76):
    """Client -> coordinator -> engine: the replies of these attempts have arrived. The receiver may
    drop its copies."""

    attempts: Attempts


class AbortRequest(Message, frozen=True, kw_only=True, tag=23):
    """Client -> coordinator -> engine: abort these attempts. The receiver answers each attempt that
    it holds with an EngineReply."""

    attempts: Attempts


def _check_names(message: str, samples: Sequence[Sample]) -> None:
    if len(samples) == 1:
        return
    ids = [sample.request_id for sample in samples]
    if len(set(ids)) != len(ids):
        raise ProtocolError(f"{message}: request ids repeat in {ids[:16]}")


# ---- commands, their answers, and weight updates in two phases


class Ack(Message, frozen=True, kw_only=True, tag=70):
    """The command `command_id` has run. As the answer to a Prepare, an Ack is the vote yes."""

    command_id: Count
    result: PlainMap | None = None

    def __post_init__(self) -> None:
        check_plain("Ack.result", self.result)


class Nack(Message, frozen=True, kw_only=True, tag=71):
    """The command `command_id` was refused or failed with `error`. As the answer to a Prepare, a
    Nack is the vote no. If `command_id` is None, the peer is refused or no longer known, and must
    connect or register again."""

    command_id: Count | None
    error: WireError


def nack_of(command_id: int | None, error: BaseException) -> Nack:
    """Return the Nack of a command with `error`, or the Nack of a peer if `command_id` is None."""
    return Nack(command_id=command_id, error=WireError.of(error))


class UpdateWeights(ControlMessage[WeightUpdateReport], frozen=True, kw_only=True, tag=77):
    """Client -> coordinator: commit `source` on all engines or on none. Answered by Ack or Nack.

    version: None for the current version + 1.
    in_flight: commit while engines run, between two steps."""

    transition = UPDATE_WEIGHTS
    source: WeightsSource
    version: Version | None = None
    in_flight: bool = False

    def merged(self, results: FleetResults[WeightUpdateReport]) -> WeightUpdateReport:
        """Return one report with the fleet's version and checksum. The report's bytes and times are
        the largest of any engine."""
        reports = results.by_rank.values()
        return WeightUpdateReport(
            version=results.weights_version,
            seconds=max((report.seconds for report in reports), default=0.0),
            stall_seconds=max((report.stall_seconds for report in reports), default=0.0),
            num_bytes=max((report.num_bytes for report in reports), default=0),
            checksum=next((report.checksum for report in reports), ""),
        )


class Prepare(Message, frozen=True, kw_only=True, tag=78):
    """Coordinator -> engine: stage and verify `source`, then vote by Ack or Nack. The served
    weights do not change. A deadline that passes without a vote counts as the vote no."""

    command_id: Count
    version: Version
    source: WeightsSource
    in_flight: bool = False
    deadline_s: Seconds | None = None


class Commit(Message, frozen=True, kw_only=True, tag=79):
    """Coordinator -> engine: serve the weights of the Prepare `command_id`. Answered by Ack. The
    coordinator sends it after all engines have voted yes."""

    command_id: Count
    version: Version


class Rollback(Message, frozen=True, kw_only=True, tag=80):
    """Coordinator -> engine: drop the weights that the Prepare `command_id` has staged. Answered by
    Ack, even if nothing is staged."""

    command_id: Count


def _with_tags(base: type[Message]) -> Iterator[tuple[Headers, type[Message]]]:
    for cls in base.__subclasses__():
        if isinstance(tag := cls.__struct_config__.tag, int):
            yield Headers(tag), cls
        yield from _with_tags(cls)


# Every message; the commands among them are rollout.control.commands.COMMANDS.
MESSAGE_TYPES: Mapping[Headers, type[Message]] = MappingProxyType(dict(_with_tags(Message)))

# The messages that a link delivers to a client or an engine. The link handles all others.
FOR_CLIENTS: frozenset[type[Message]] = frozenset({EngineReply, EngineReplyPartial, Ack, Nack})
FOR_ENGINES: frozenset[type[Message]] = frozenset(
    {AssignRequest, AbortRequest, ReplyAck, Prepare, Commit, Rollback, *COMMANDS}
)
