"""Commands, their answers, and weight updates in two phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from rollout import errors
from rollout.coordinator.protocol.field_codecs import WireData, wire_data
from rollout.coordinator.protocol.field_types import Count, Length, Name, PlainMap, Seconds, Version
from rollout.coordinator.protocol.headers import CONTROL_HEADERS, Headers
from rollout.errors import ProtocolError, RolloutError, decode_error, encode_error


@wire_data
class WireError(WireData):
    """An error on its way: the class of rollout.errors it has, or the name of a foreign one."""

    type_name: Name
    message: str | None
    is_transient: bool = False
    request_id: Count | None = None

    @classmethod
    def of(cls, error: BaseException) -> WireError:
        """Return `error` as its nearest class that peers know."""
        encoded = encode_error(error)
        if isinstance(error, RolloutError) and encoded["type"] == type(error).__name__:
            public = (base for base in type(error).__mro__ if base.__module__ == errors.__name__)
            encoded["type"] = next(public).__name__
        return cls(
            type_name=encoded["type"],
            message=encoded["message"],
            is_transient=encoded["is_transient"],
            request_id=encoded.get("request_id"),
        )

    def to_error(self) -> RolloutError:
        """Return the same error, to be raised; a class unknown here becomes a RemoteError."""
        encoded: dict[str, Any] = {
            "type": self.type_name,
            "message": self.message,
            "is_transient": self.is_transient,
            "request_id": self.request_id,
        }
        return decode_error(encoded)


@wire_data
class Command(WireData):
    """Client -> coordinator -> engines. Answered once, by Ack or Nack of its `command_id`.

    Ids are the sender's; a repeated one is the same command. deadline_s: from arrival.
    """

    header: Headers
    command_id: Count
    arguments: PlainMap = field(default_factory=dict)
    deadline_s: Seconds | None = None

    def __post_init__(self) -> None:
        if self.header not in CONTROL_HEADERS:
            raise ProtocolError(f"Command: {self.header!r} is no command")


@wire_data
class Ack(WireData):
    """Command `command_id` is done; to Prepare it is the vote yes."""

    command_id: Count
    result: PlainMap = field(default_factory=dict)


@wire_data
class Nack(WireData):
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


# ---- weights


@wire_data
class TensorEntry(WireData):
    """Where one tensor lies in its source: `num_bytes` from `offset`, row-major."""

    dtype: Name
    shape: Annotated[tuple[Count, ...], Length(0, 16)]
    offset: Count
    num_bytes: Count


@wire_data
class WeightsSource(WireData):
    """Where weights can be fetched; they never travel over these sockets.

    kind: how (a shared segment, a checkpoint directory). address: where. checksum: of all tensors,
    as `engine.weights_checksum()` will report it once they are served. tensors_checksum: of the
    tensors as they lie there, before any cast, for whoever reads them.
    """

    kind: Name
    address: Name
    manifest: Mapping[str, TensorEntry]
    checksum: Name
    tensors_checksum: Name = ""


@wire_data
class UpdateWeights(WireData):
    """Client -> coordinator: commit `source` on all engines or none. Answered by Ack or Nack.

    version: None means current + 1. in_flight: at a step edge of running engines.
    """

    command_id: Count
    source: WeightsSource
    version: Version | None = None
    in_flight: bool = False
    deadline_s: Seconds | None = None


@wire_data
class Prepare(WireData):
    """Coordinator -> engine: stage and verify `source`, then vote by Ack or Nack. Changes nothing
    that is served. A deadline that passes without a vote is the vote no."""

    command_id: Count
    version: Version
    source: WeightsSource
    in_flight: bool = False
    deadline_s: Seconds | None = None


@wire_data
class Commit(WireData):
    """Coordinator -> engine: all have voted yes to `command_id`; serve it. Answered by Ack."""

    command_id: Count
    version: Version


@wire_data
class Rollback(WireData):
    """Coordinator -> engine: drop what `command_id` has staged. Answered by Ack, also if nothing
    was."""

    command_id: Count
    version: Version
