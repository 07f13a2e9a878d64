"""The wire protocol: one msgpack array [header, field, ...] per message. See docs/protocol.md."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

from rollout.coordinator.protocol.field_codecs import class_codec_of
from rollout.coordinator.protocol.framing import (
    DEFAULT_MAX_FRAME_BYTES,
    check_num_items,
    pack,
    unpack,
)
from rollout.coordinator.protocol.headers import CONTROL_HEADERS, PROTOCOL_VERSION, Headers
from rollout.coordinator.protocol.messages_control import (
    Ack,
    Command,
    Commit,
    Nack,
    Prepare,
    Rollback,
    TensorEntry,
    UpdateWeights,
    WeightsSource,
    WireError,
    error_from,
    nack_of,
)
from rollout.coordinator.protocol.messages_packed import (
    pack_params,
    pack_record,
    unpack_params,
    unpack_record,
)
from rollout.coordinator.protocol.messages_requests import (
    AbortRequest,
    AssignRequest,
    Attempt,
    EngineReply,
    EngineReplyPartial,
    ReplyAck,
    Sample,
    SubmitRequest,
)
from rollout.coordinator.protocol.messages_session import (
    Connect,
    ConnectAck,
    Credit,
    Disconnect,
    EngineStatus,
    Heartbeat,
    Register,
    RegisterAck,
    RunningAttempt,
)
from rollout.coordinator.protocol.token_runs import TokenRun, TopNRun, join_runs
from rollout.errors import ProtocolError

__all__ = [
    "ALLOWED",
    "AbortRequest",
    "Ack",
    "AssignRequest",
    "Attempt",
    "Command",
    "Commit",
    "Connect",
    "ConnectAck",
    "Credit",
    "DEFAULT_MAX_FRAME_BYTES",
    "Disconnect",
    "EngineReply",
    "EngineReplyPartial",
    "EngineStatus",
    "Headers",
    "Heartbeat",
    "MESSAGE_TYPES",
    "Message",
    "Nack",
    "PROTOCOL_VERSION",
    "Prepare",
    "ProtocolVersionError",
    "Register",
    "RegisterAck",
    "ReplyAck",
    "Role",
    "Rollback",
    "RunningAttempt",
    "Sample",
    "SubmitRequest",
    "TensorEntry",
    "TokenRun",
    "TopNRun",
    "UpdateWeights",
    "WeightsSource",
    "WireError",
    "decode",
    "encode",
    "error_from",
    "join_runs",
    "nack_of",
    "pack_params",
    "pack_record",
    "unpack_params",
    "unpack_record",
]

Message = (
    Connect
    | ConnectAck
    | Credit
    | SubmitRequest
    | EngineReply
    | EngineReplyPartial
    | AbortRequest
    | Command
    | Disconnect
    | Ack
    | Nack
    | Heartbeat
    | Register
    | RegisterAck
    | AssignRequest
    | ReplyAck
    | UpdateWeights
    | Prepare
    | Commit
    | Rollback
)

MESSAGE_TYPES: Mapping[Headers, type[Message]] = MappingProxyType(
    {
        Headers.CONNECT: Connect,
        Headers.CONNECT_ACK: ConnectAck,
        Headers.CREDIT: Credit,
        Headers.SUBMIT_REQUEST: SubmitRequest,
        Headers.ENGINE_REPLY: EngineReply,
        Headers.ENGINE_REPLY_PARTIAL: EngineReplyPartial,
        Headers.ABORT_REQUEST: AbortRequest,
        Headers.DISCONNECT: Disconnect,
        Headers.ACK: Ack,
        Headers.NACK: Nack,
        Headers.HEARTBEAT: Heartbeat,
        Headers.REGISTER: Register,
        Headers.REGISTER_ACK: RegisterAck,
        Headers.ASSIGN_REQUEST: AssignRequest,
        Headers.REPLY_ACK: ReplyAck,
        Headers.UPDATE_WEIGHTS: UpdateWeights,
        Headers.PREPARE: Prepare,
        Headers.COMMIT: Commit,
        Headers.ROLLBACK: Rollback,
        **dict.fromkeys(sorted(CONTROL_HEADERS), Command),
    }
)
# A command's header is its first field; all others stand before the fields.
_TYPES: Mapping[Headers, Any] = MESSAGE_TYPES  # mypy takes no class for hashable
_CODECS = {
    header: class_codec_of(cls, None if cls is Command else int(header))
    for header, cls in _TYPES.items()
}
_WRITERS = {cls: _CODECS[header].write for header, cls in MESSAGE_TYPES.items()}
_READERS = {int(header): codec.read for header, codec in _CODECS.items()}
_HANDSHAKES = frozenset({int(Headers.CONNECT), int(Headers.REGISTER)})


class ProtocolVersionError(ProtocolError):
    """A handshake in another version of the protocol; to be answered by a Nack that says so."""


class Role(Enum):
    """Who a frame comes from, as its receiver knows the peer."""

    STRANGER = "stranger"
    CLIENT = "client"
    ENGINE = "engine"
    COORDINATOR = "coordinator"


ALLOWED: Mapping[Role, frozenset[type[Message]]] = MappingProxyType(
    {
        Role.STRANGER: frozenset({Connect, Register}),
        Role.CLIENT: frozenset(
            {
                Connect,
                SubmitRequest,
                AbortRequest,
                ReplyAck,
                Command,
                UpdateWeights,
                Heartbeat,
                Disconnect,
            }
        ),
        Role.ENGINE: frozenset(
            {Register, Credit, EngineReplyPartial, EngineReply, Ack, Nack, Heartbeat, Disconnect}
        ),
        Role.COORDINATOR: frozenset(
            {
                ConnectAck,
                RegisterAck,
                AssignRequest,
                EngineReplyPartial,
                EngineReply,
                ReplyAck,
                AbortRequest,
                Command,
                Prepare,
                Commit,
                Rollback,
                Ack,
                Nack,
                Heartbeat,
                Disconnect,
            }
        ),
    }
)


def encode(message: Message, max_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> bytes:
    """Return the frame of `message`. The same checks as `decode`, so that the fault is found here.

    Raises ProtocolError naming the field at fault, or the size or the number of items of a frame
    nobody would take.
    """
    frame = pack(_WRITERS[type(message)](message))
    if len(frame) > max_bytes:
        name = type(message).__name__
        raise ProtocolError(f"{name} of {len(frame)} bytes, at most {max_bytes} are allowed")
    check_num_items(frame)
    return frame


def decode(frame: bytes | memoryview, max_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> Message:
    """Return the message in `frame`; its arrays are read-only views of the received bytes.

    Raises ProtocolError naming what is wrong, and nothing else, whatever the bytes; of a Connect or
    Register in another version, ProtocolVersionError.
    """
    encoded = unpack(frame, max_bytes=max_bytes)
    if type(encoded) is not list or not encoded:
        raise ProtocolError(f"a frame is an array that starts with a header, got {_kind(encoded)}")
    header = encoded[0]
    if type(header) is not int:
        raise ProtocolError(f"the header is no integer but {_kind(header)}")
    read = _READERS.get(header)
    if read is None:
        raise ProtocolError(f"unknown header {header}")
    if header in _HANDSHAKES:
        _check_version(encoded)
    message: Message = read(encoded)
    return message


def _check_version(handshake: list[Any]) -> None:
    """Raise ProtocolVersionError if the first field, which every version has, is another one."""
    version = handshake[1] if len(handshake) > 1 else None
    if type(version) is int and version != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"the peer speaks protocol {version}, this process {PROTOCOL_VERSION}"
        )


def _kind(value: Any) -> str:
    return "an empty one" if value == [] else type(value).__name__
