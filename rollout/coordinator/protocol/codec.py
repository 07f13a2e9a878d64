"""Functions that encode messages to frames and decode frames to messages.

Used by `rollout.coordinator.net.link`, `rollout.coordinator.net.sockets`,
`rollout.coordinator.coordinator` and `rollout.coordinator.core.core`. Each message is one frame. A
Batch is one frame that holds several frames. No state is kept.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from rollout.coordinator.protocol.messages import (
    MAX_SAMPLES,
    MESSAGE_TYPES,
    PROTOCOL_VERSION,
    Ack,
    AssignRequest,
    Connect,
    EngineReply,
    Headers,
    Nack,
    Register,
    SubmitRequest,
    WireError,
)
from rollout.errors import ProtocolError
from rollout.wire import (
    DEFAULT_MAX_FRAME_BYTES,
    FAULTS,
    MAX_PLAIN_BYTES,
    Count,
    Message,
    pack,
)

_DECODERS = {int(header): msgspec.msgpack.Decoder(cls) for header, cls in MESSAGE_TYPES.items()}
_FIELD_IN_FAULT = re.compile(r"`\$\[(\d+)\]")

MAX_BATCH_FRAMES = 256
# Bounds of the Batches that `batched` makes: copying a larger frame takes longer than sending it.
_MAX_BATCHED_FRAME_BYTES = 2**14
_MAX_BATCH_BYTES = 2**17


class ProtocolVersionError(ProtocolError):
    """A Connect or Register has another protocol version. The coordinator answers with a Nack."""


class _Handshake(msgspec.Struct, array_like=True):
    """First fields of a Connect or Register in every protocol version."""

    header: int
    protocol_version: int


class _NamedAttempt(msgspec.Struct, array_like=True):
    """First fields of a Sample."""

    request_id: Count
    attempt: Count = 0


class _NamedSamples(msgspec.Struct, array_like=True):
    """First fields of a SubmitRequest or AssignRequest."""

    header: int
    samples: Annotated[tuple[_NamedAttempt, ...], Meta(max_length=MAX_SAMPLES)]


class _NamedReply(msgspec.Struct, array_like=True):
    """First fields of an EngineReply."""

    header: int
    request_id: Count
    attempt: Count = 0


class _NamedCommand(msgspec.Struct, array_like=True):
    """First fields of commands, their answers and the messages of a weight update."""

    header: int
    command_id: Count


class _Batch(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=Headers.BATCH.value):
    """Frames for one peer. The peer handles them in order, as if each had arrived alone."""

    frames: Annotated[tuple[bytes, ...], Meta(max_length=MAX_BATCH_FRAMES)]


_handshake_decoder = msgspec.msgpack.Decoder(_Handshake)
_batch_decoder = msgspec.msgpack.Decoder(_Batch)
_samples_decoder = msgspec.msgpack.Decoder(_NamedSamples)
_reply_decoder = msgspec.msgpack.Decoder(_NamedReply)
_command_decoder = msgspec.msgpack.Decoder(_NamedCommand)


def encode(message: Message, max_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> bytes:
    """Return the frame of `message`. Types and ranges of its fields are not checked. Raises
    ProtocolError if msgpack cannot carry a value, or if the frame is longer than `max_bytes`. An
    Ack may not be longer than MAX_PLAIN_BYTES either."""
    name, num_allowed = type(message).__name__, max_bytes
    try:
        frame = pack(message)
    except ProtocolError as fault:
        raise ProtocolError(f"{name} {fault}") from fault
    if type(message) is Ack:  # its result is of any type
        num_allowed = min(max_bytes, MAX_PLAIN_BYTES)
    if len(frame) > num_allowed:
        raise ProtocolError(f"{name} of {len(frame)} bytes, at most {num_allowed} are allowed")
    return frame


def require_valid(message: Message) -> None:
    """Raise ProtocolError, naming the field, if receivers refuse `message`. Only messages with a
    user's values need this check."""
    decode(encode(message))


def decode(frame: bytes | memoryview, max_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> Message:
    """Return the message in `frame`, which must not be a Batch. The message's arrays are read-only.
    Raises ProtocolVersionError for a Connect or Register of another version. Raises ProtocolError
    for all other malformed bytes."""
    if len(frame) > max_bytes:
        raise ProtocolError(f"{len(frame)} bytes, at most {max_bytes} are allowed")
    # A message has fewer than 16 fields, and a header is below 128: one byte each.
    if len(frame) < 2 or frame[0] >> 4 != 9 or frame[0] == 0x90:
        raise ProtocolError("a frame is a short array that starts with a header")
    decoder = _DECODERS.get(frame[1])
    if decoder is None:
        raise ProtocolError(f"unknown header {frame[1]:#04x}")
    if len(frame) > MAX_PLAIN_BYTES and decoder.type is Ack:  # its result is of any type
        raise ProtocolError(
            f"{decoder.type.__name__} of {len(frame)} bytes, at most {MAX_PLAIN_BYTES} are allowed"
        )
    if decoder.type in (Connect, Register):
        _check_version(frame)
    try:
        return decoder.decode(frame)
    except FAULTS as fault:
        raise ProtocolError(_describe(decoder.type, str(fault))) from fault


def _check_version(frame: bytes | memoryview) -> None:
    """Raise ProtocolVersionError if the version in a handshake is not PROTOCOL_VERSION."""
    try:
        version = _handshake_decoder.decode(frame).protocol_version
    except FAULTS:
        return  # Not a handshake; the caller's decoder says why.
    if version != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"the peer speaks protocol {version}, this process {PROTOCOL_VERSION}"
        )


def _describe(cls: type[Message], fault: str) -> str:
    """Return the text of an error: the name of `cls`, the faulty field if known, and `fault`."""
    position = int(found[1]) if (found := _FIELD_IN_FAULT.search(fault)) else 0
    field = f".{cls.__struct_fields__[position - 1]}" if position else ""
    return f"{cls.__name__}{field}: {fault:.200}"


def failures_of(
    frame: bytes, fault: ProtocolError, accepted: Collection[type[Message]]
) -> Sequence[EngineReply | Nack]:
    """Return answers with the error `fault` to a malformed frame. The answers are an EngineReply
    for each request that the frame names, or a Nack for the command that it names. Returns () if
    the frame names neither, or if its message type is not in `accepted`."""
    decoder = _DECODERS.get(frame[1]) if len(frame) > 1 else None
    if decoder is None or decoder.type not in accepted:
        return ()
    error = WireError.of(fault)
    named: Sequence[_NamedAttempt | _NamedReply]
    try:
        if decoder.type in (SubmitRequest, AssignRequest):
            named = _samples_decoder.decode(frame).samples
        elif decoder.type is EngineReply:
            named = (_reply_decoder.decode(frame),)
        elif "command_id" in decoder.type.__struct_fields__:
            return (Nack(command_id=_command_decoder.decode(frame).command_id, error=error),)
        else:
            return ()
    except FAULTS:
        return ()
    return [
        EngineReply(request_id=n.request_id, attempt=n.attempt, error=error, is_failed=True)
        for n in named
    ]


# ---- Batches


def frames_in(frame: bytes) -> Sequence[bytes]:
    """Return the frames of a Batch, or any other frame alone. Raises ProtocolError for an
    unreadable Batch."""
    if len(frame) < 2 or frame[1] != Headers.BATCH:
        return (frame,)
    try:
        return _batch_decoder.decode(frame).frames
    except FAULTS as fault:
        raise ProtocolError(f"Batch: {fault!s:.200}") from fault


def batched(
    frames: Sequence[bytes], max_bytes: int = DEFAULT_MAX_FRAME_BYTES
) -> Sequence[tuple[bytes, int]]:
    """Join small frames into Batches, in order. Returns (frame, number of messages) pairs."""
    if len(frames) == 1:
        return [(frames[0], 1)]
    together: list[tuple[bytes, int]] = []
    waiting: list[bytes] = []
    num_left = limit = min(_MAX_BATCH_BYTES, max_bytes - 16)
    for frame in frames:
        num_bytes = len(frame) + 5  # with msgpack's header of binary
        is_large = num_bytes > _MAX_BATCHED_FRAME_BYTES
        if waiting and (is_large or num_bytes > num_left or len(waiting) == MAX_BATCH_FRAMES):
            together.append((_joined(waiting), len(waiting)))
            waiting, num_left = [], limit
        if is_large:
            together.append((frame, 1))
        else:
            waiting.append(frame)
            num_left -= num_bytes
    if waiting:
        together.append((_joined(waiting), len(waiting)))
    return together


def _joined(frames: Sequence[bytes]) -> bytes:
    return frames[0] if len(frames) == 1 else pack(_Batch(tuple(frames)))
