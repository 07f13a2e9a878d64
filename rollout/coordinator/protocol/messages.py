"""The messages of the wire, one msgpack array [header, field, ...] each: docs/protocol.md.

A request is named by (request_id, attempt) on both links. Between client and coordinator the id is
the client's and the attempt is 0; between coordinator and engine the id is the coordinator's, and
each assignment of the request is another attempt. A message forwarded from one link to the other
changes its name, nothing else. Times are durations: no clock is shared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType, new_class
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, field

from rollout.coordinator.protocol.headers import PROTOCOL_VERSION as PROTOCOL_VERSION
from rollout.coordinator.protocol.headers import Headers as Headers
from rollout.coordinator.protocol.parts import Attempt as Attempt
from rollout.coordinator.protocol.parts import Attempts, Samples
from rollout.coordinator.protocol.parts import EngineStatus as EngineStatus
from rollout.coordinator.protocol.parts import RunningAttempt as RunningAttempt
from rollout.coordinator.protocol.parts import Sample as Sample
from rollout.coordinator.protocol.parts import TensorEntry as TensorEntry
from rollout.coordinator.protocol.parts import WeightsSource as WeightsSource
from rollout.coordinator.protocol.parts import WireError as WireError
from rollout.coordinator.protocol.token_runs import TokenRun as TokenRun
from rollout.coordinator.protocol.token_runs import TokenRuns as TokenRuns
from rollout.coordinator.protocol.token_runs import TopNRun as TopNRun
from rollout.coordinator.protocol.token_runs import join_runs as join_runs
from rollout.coordinator.protocol.wire import DEFAULT_MAX_FRAME_BYTES as DEFAULT_MAX_FRAME_BYTES
from rollout.coordinator.protocol.wire import (
    FAULTS,
    MAX_ITEMS,
    MAX_PLAIN_BYTES,
    TOKEN_IDS,
    Count,
    Int,
    Int32s,
    Name,
    PlainMap,
    Seconds,
    Uuid,
    Version,
    WireData,
    check_plain,
    check_version,
    pack,
    set_columns,
)
from rollout.coordinator.protocol.wire import ProtocolVersionError as ProtocolVersionError
from rollout.errors import ProtocolError, RolloutError

_TOKEN_COLUMNS = {"prompt_tokens": TOKEN_IDS}


class Message(WireData, frozen=True):
    """Base of all that is a frame of its own. The tag of a class is its header."""


# ---- who is there: handshakes, heartbeats, goodbyes


class Connect(Message, frozen=True, kw_only=True, tag=0):
    """Client -> coordinator, first of all. `client_id`: a uuid; after a reconnect the same."""

    protocol_version: Count = PROTOCOL_VERSION
    client_id: Uuid
    name: Name = ""


class ConnectAck(Message, frozen=True, kw_only=True, tag=1):
    """Coordinator -> client. state: name of the coordinator's. lease_s: a client unheard of for so
    long has vanished. heartbeat_s: how often it should send one. max_requests, max_request_bytes:
    the most requests of one client, and bytes of them, that may be unfinished or not acknowledged.
    is_resumed: this client was here before, and nothing of it is forgotten.
    """

    protocol_version: Count = PROTOCOL_VERSION
    coordinator_id: Uuid
    state: Name
    data_parallel_size: Count
    weights_version: Version
    lease_s: Seconds
    heartbeat_s: Seconds
    max_requests: Count = 2**16
    max_request_bytes: Count = 2**30
    is_resumed: bool = False


class Register(Message, frozen=True, kw_only=True, tag=73):
    """Engine -> coordinator, first of all and whenever its lease has run out.

    engine_id: a uuid, one for the life of the process. state: name of its state.
    prepared_command_id: the Prepare it has voted yes to and has no decision on; Commit or Rollback
    follows the RegisterAck.
    """

    protocol_version: Count = PROTOCOL_VERSION
    engine_id: Uuid
    state: Name
    weights_version: Version
    weights_checksum: Name
    block_size_tokens: Count
    max_requests: Count
    running: Annotated[tuple[RunningAttempt, ...], Meta(max_length=MAX_ITEMS)] = ()
    prepared_command_id: Count | None = None


class RegisterAck(Message, frozen=True, kw_only=True, tag=74):
    """Coordinator -> engine: what to be. The engine aborts all attempts that `keep` does not name.

    rank: its place, small integers. state: the one to enter before it gets work.
    lease_s: stop stepping when the coordinator was not heard for so long. heartbeat_s: how often to
    send one. progress_deadline_s: a step count that stands still for so long, with work to do, is
    death. report_interval_tokens: most tokens of a request between two partial replies.
    weights: where to get `weights_version`, None if the engine serves it. session: names this
    registration in the engine's Credit.
    """

    coordinator_id: Uuid
    rank: Count
    state: Name
    lease_s: Seconds
    heartbeat_s: Seconds
    progress_deadline_s: Seconds
    report_interval_tokens: Count
    weights_version: Version
    weights: WeightsSource | None = None
    keep: Attempts = ()
    session: Count = 0


class Heartbeat(Message, frozen=True, kw_only=True, tag=72):
    """Either way; the coordinator answers each with its `sequence` and no status, which renews the
    lease from when that one was *sent*. `status`: engines only."""

    sequence: Count
    status: EngineStatus | None = None


class Credit(Message, frozen=True, kw_only=True, tag=82):
    """Engine -> coordinator: requests it accepts since it registered, which never sinks. Room is
    granted less assigned, so that messages on their way cannot confuse it. session: that of the
    RegisterAck it counts from; credit of an earlier one grants nothing."""

    num_granted: Count
    session: Count = 0


class Disconnect(Message, frozen=True, kw_only=True, tag=60):
    """Either way: the sender goes, and says why. is_fault: it failed, perhaps by `suspects`, the
    attempts of its failing step; the loss counts against no others."""

    reason: Name = ""
    is_fault: bool = False
    suspects: Attempts = ()


# ---- requests and what comes back of them


class SubmitRequest(Message, frozen=True, kw_only=True, tag=20):
    """Client -> coordinator: samples of one prompt, which go to one rank. Idempotent by name.

    prompt_tokens: int32 [n]. priority: higher first. deadline_s: from arrival. streaming: send
    partial replies on to the client.
    """

    samples: Samples
    prompt_tokens: Int32s
    priority: Int = 0
    deadline_s: Seconds | None = None
    streaming: bool = False

    def __post_init__(self) -> None:
        set_columns(self, _TOKEN_COLUMNS)
        _check_names("SubmitRequest", self.samples)
        for sample in self.samples:
            if sample.attempt or sample.resumed is not None:
                raise ProtocolError("SubmitRequest: a client's sample is attempt 0, not resumed")


class AssignRequest(Message, frozen=True, kw_only=True, tag=75):
    """Coordinator -> engine: run these samples of one prompt, int32 [n]."""

    samples: Samples
    prompt_tokens: Int32s
    priority: Int = 0

    def __post_init__(self) -> None:
        set_columns(self, _TOKEN_COLUMNS)
        _check_names("AssignRequest", self.samples)


class EngineReplyPartial(Message, frozen=True, kw_only=True, tag=22):
    """Progress of one request: coordinator -> client, if it streams. An engine sends it only of a
    Progress that is too long for one frame."""

    request_id: Count
    attempt: Count = 0
    tokens: TokenRun


class Progress(Message, frozen=True, kw_only=True, tag=83):
    """Engine -> coordinator: what many attempts have generated since it last told of them."""

    runs: TokenRuns

    def partials(self) -> Iterator[EngineReplyPartial]:
        """Yield the same, one message an attempt."""
        for request_id, attempt, run in self.runs.apart():
            yield EngineReplyPartial(request_id=request_id, attempt=attempt, tokens=run)


class EngineReply(Message, frozen=True, kw_only=True, tag=21):
    """The end of a request: engine -> coordinator -> client. The sender keeps it until ReplyAck.

    record: packed by `pack_record`; if None, `error` says why. is_failed: its status is FAILED."""

    request_id: Count
    attempt: Count = 0
    record: bytes | None = None
    error: WireError | None = None
    is_failed: bool = False

    def __post_init__(self) -> None:
        if self.record is None and (self.error is None or not self.is_failed):
            raise ProtocolError("EngineReply: without a record it needs an error and is_failed")


class ReplyAck(Message, frozen=True, kw_only=True, tag=76):
    """Client -> coordinator -> engine: these replies are safe here and may be forgotten there."""

    attempts: Attempts


class AbortRequest(Message, frozen=True, kw_only=True, tag=23):
    """Client -> coordinator -> engine: end these. Each is answered by its EngineReply; what comes
    of attempts that count no more is dropped."""

    attempts: Attempts


def _check_names(message: str, samples: Sequence[Sample]) -> None:
    """Raise ProtocolError if two samples have one request id."""
    if len(samples) == 1:
        return
    ids = [sample.request_id for sample in samples]
    if len(set(ids)) != len(ids):
        raise ProtocolError(f"{message}: request ids repeat in {ids[:16]}")


# ---- commands, their answers, and weight updates in two phases


class Command(Message, frozen=True, kw_only=True):
    """Client -> coordinator -> engines. Answered once, by Ack or Nack of its `command_id`, which is
    the sender's; a repeated one is the same command. One class per header: COMMAND_TYPES."""

    header: ClassVar[Headers]
    command_id: Count
    arguments: PlainMap = field(default_factory=dict)
    deadline_s: Seconds | None = None

    def __post_init__(self) -> None:
        check_plain(f"{type(self).__name__}.arguments", self.arguments)


class Ack(Message, frozen=True, kw_only=True, tag=70):
    """Command `command_id` is done; to Prepare it is the vote yes."""

    command_id: Count
    result: PlainMap = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_plain("Ack.result", self.result)


class Nack(Message, frozen=True, kw_only=True, tag=71):
    """Command `command_id` is refused or has failed, and why; to Prepare it is the vote no.

    Without an id: the peer is not taken, or no longer known, and may only connect or register.
    """

    command_id: Count | None
    error: WireError


def nack_of(command_id: int | None, error: BaseException) -> Nack:
    """Return the refusal of a command (None: of a handshake) by `error`."""
    return Nack(command_id=command_id, error=WireError.of(error))


def error_from(nack: Nack) -> RolloutError:
    """Return the error to raise where the refused command was given."""
    return nack.error.to_error()


class UpdateWeights(Message, frozen=True, kw_only=True, tag=77):
    """Client -> coordinator: commit `source` on all engines or none. Answered by Ack or Nack.

    version: None means current + 1. in_flight: at a step edge of running engines.
    """

    command_id: Count
    source: WeightsSource
    version: Version | None = None
    in_flight: bool = False
    deadline_s: Seconds | None = None


class Prepare(Message, frozen=True, kw_only=True, tag=78):
    """Coordinator -> engine: stage and verify `source`, then vote by Ack or Nack. Changes nothing
    that is served. A deadline that passes without a vote is the vote no."""

    command_id: Count
    version: Version
    source: WeightsSource
    in_flight: bool = False
    deadline_s: Seconds | None = None


class Commit(Message, frozen=True, kw_only=True, tag=79):
    """Coordinator -> engine: all have voted yes to `command_id`; serve it. Answered by Ack."""

    command_id: Count
    version: Version


class Rollback(Message, frozen=True, kw_only=True, tag=80):
    """Coordinator -> engine: drop what `command_id` has staged. Answered by Ack, also if nothing
    was."""

    command_id: Count
    version: Version


class Role(Enum):
    """Who a frame comes from, as its receiver knows the peer."""

    STRANGER = "stranger"
    CLIENT = "client"
    ENGINE = "engine"
    COORDINATOR = "coordinator"


COMMAND_TYPES: Mapping[Headers, type[Command]] = MappingProxyType(
    {
        header: new_class(
            header.name.title().replace("_", ""),
            (Command,),
            {"tag": header.value},
            lambda namespace, header=header: namespace.update(header=header),  # type: ignore[misc]
        )
        for header in (
            *(Headers.PAUSE, Headers.UNPAUSE, Headers.SUSPEND, Headers.RESUME, Headers.STOP),
            *(Headers.SET_GENERATION_EPOCH, Headers.INCREMENT_STALENESS),
            *(Headers.SHUTDOWN, Headers.STATS),
        )
    }
)


def _classes(*classes: type[Message]) -> frozenset[type[Message]]:
    return frozenset(classes)


_COMMANDS = _classes(*COMMAND_TYPES.values())
_ANSWERS = _classes(EngineReplyPartial, EngineReply, Ack, Nack)
_HANDSHAKES = _classes(Connect, Register)
_PRESENCE = _classes(Heartbeat, Disconnect)
ALLOWED: Mapping[Role, frozenset[type[Message]]] = MappingProxyType(
    {
        Role.STRANGER: _HANDSHAKES,
        Role.CLIENT: _COMMANDS
        | _PRESENCE
        | _classes(Connect, SubmitRequest, AbortRequest, ReplyAck, UpdateWeights),
        Role.ENGINE: _ANSWERS | _PRESENCE | _classes(Register, Credit, Progress),
        Role.COORDINATOR: _COMMANDS
        | _ANSWERS
        | _PRESENCE
        | _classes(ConnectAck, RegisterAck, AssignRequest, ReplyAck, AbortRequest)
        | _classes(Prepare, Commit, Rollback),
    }
)
_ALL = {cls.__struct_config__.tag: cls for classes in ALLOWED.values() for cls in classes}
MESSAGE_TYPES: Mapping[Headers, type[Message]] = MappingProxyType(
    {header: _ALL[header] for header in Headers}
)


# ---- to bytes and back

_DECODERS = {int(header): msgspec.msgpack.Decoder(cls) for header, cls in MESSAGE_TYPES.items()}
_WITH_PLAIN_MAP = _COMMANDS | _classes(Ack)
_FIELD_IN_FAULT = re.compile(r"`\$\[(\d+)\]")


def encode(message: Message, max_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> bytes:
    """Return the frame of `message`, which is read again, so that a fault is found by its sender.

    Raises ProtocolError as `decode` does.
    """
    name = type(message).__name__
    try:
        frame = pack(message)
    except ProtocolError as fault:
        raise ProtocolError(f"{name} {fault}") from fault
    if len(frame) > max_bytes:
        raise ProtocolError(f"{name} of {len(frame)} bytes, at most {max_bytes} are allowed")
    decode(frame, max_bytes)
    return frame


def decode(frame: bytes | memoryview, max_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> Message:
    """Return the message in `frame`; its arrays are read-only.

    Raises ProtocolError naming what is wrong, and nothing else, whatever the bytes; of a Connect or
    Register in another version, ProtocolVersionError.
    """
    if len(frame) > max_bytes:
        raise ProtocolError(f"{len(frame)} bytes, at most {max_bytes} are allowed")
    # A message has fewer than 16 fields, and a header is below 128: one byte each.
    if len(frame) < 2 or frame[0] >> 4 != 9 or frame[0] == 0x90:
        raise ProtocolError("a frame is a short array that starts with a header")
    decoder = _DECODERS.get(frame[1])
    if decoder is None:
        raise ProtocolError(f"unknown header {frame[1]:#04x}")
    if len(frame) > MAX_PLAIN_BYTES and decoder.type in _WITH_PLAIN_MAP:
        raise ProtocolError(
            f"{decoder.type.__name__} of {len(frame)} bytes, at most {MAX_PLAIN_BYTES} are allowed"
        )
    if decoder.type in _HANDSHAKES:
        check_version(frame)
    try:
        return decoder.decode(frame)
    except FAULTS as fault:
        raise ProtocolError(_describe(decoder.type, str(fault))) from fault


def _describe(cls: type[Message], fault: str) -> str:
    """Name the message and its field at fault."""
    position = int(found[1]) if (found := _FIELD_IN_FAULT.search(fault)) else 0
    field = f".{cls.__struct_fields__[position - 1]}" if position else ""
    return f"{cls.__name__}{field}: {fault:.200}"
