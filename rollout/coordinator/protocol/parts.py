"""Parts of messages: what several of them carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from rollout import errors
from rollout.coordinator.protocol.token_runs import TokenRun
from rollout.coordinator.protocol.wire import (
    MAX_ITEMS,
    MAX_PLAIN_BYTES,
    Count,
    Name,
    Seed,
    Version,
    WireData,
)
from rollout.errors import ProtocolError, RolloutError, decode_error, encode_error


class Attempt(WireData, frozen=True, kw_only=True):
    """One assignment of one request. Of two attempts of a request the larger one counts."""

    request_id: Count
    attempt: Count = 0


class RunningAttempt(WireData, frozen=True, kw_only=True):
    """An attempt that an engine still holds, finished or not, and its generated tokens."""

    request_id: Count
    attempt: Count
    num_tokens: Count


class Sample(WireData, frozen=True, kw_only=True):
    """One request of a group. `sampling_params`: packed by `pack_params`, for the engine to read.

    seed: fixed by the client; None lets the engine derive one. resumed: all tokens of earlier
    attempts, from offset 0; None for a fresh request.
    """

    request_id: Count
    attempt: Count = 0
    sampling_params: Annotated[bytes, Meta(max_length=MAX_PLAIN_BYTES)]
    seed: Seed | None = None
    resumed: TokenRun | None = None

    def __post_init__(self) -> None:
        if self.resumed is not None and self.resumed.offset:
            raise ProtocolError(f"Sample: resumed tokens start at {self.resumed.offset}, not 0")


Attempts = Annotated[tuple[Attempt, ...], Meta(max_length=MAX_ITEMS)]
Samples = Annotated[tuple[Sample, ...], Meta(min_length=1, max_length=2**16)]


class EngineStatus(WireData, frozen=True, kw_only=True):
    """An engine as it sends a heartbeat. `num_steps` is what progress is judged by."""

    state: Name
    num_steps: Count
    num_waiting: Count
    num_running: Count
    num_blocks_free: Count
    weights_version: Version


class WireError(WireData, frozen=True, kw_only=True):
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


class TensorEntry(WireData, frozen=True, kw_only=True):
    """Where one tensor lies in its source: `num_bytes` from `offset`, row-major."""

    dtype: Name
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    offset: Count
    num_bytes: Count


class WeightsSource(WireData, frozen=True, kw_only=True):
    """Where weights can be fetched; they never travel over these sockets.

    kind: how (a shared segment, a checkpoint directory). address: where. checksum: of all tensors,
    as `engine.weights_checksum()` will report it once they are served. tensors_checksum: of the
    tensors as they lie there, before any cast.
    """

    kind: Name
    address: Name
    manifest: Annotated[Mapping[str, TensorEntry], Meta(max_length=2**16)]
    checksum: Name
    tensors_checksum: Name = ""
