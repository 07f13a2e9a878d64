"""What travels through the coordinator unopened: sampling params and records, packed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rollout.coordinator.protocol.framing import pack, unpack
from rollout.errors import ProtocolError, RolloutError
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.sampling_params import SamplingParams

T = TypeVar("T")
# A record lists a few items per token: ids, times, versions, events.
_MAX_RECORD_ITEMS = 2**24


def pack_params(params: SamplingParams) -> bytes:
    """Return `params` as the bytes of a Sample."""
    return pack(params.serialize())


def unpack_params(packed: bytes) -> SamplingParams:
    """Return what `pack_params` wrote. Raises ProtocolError if it is no map, InvalidRequestError
    naming a value out of its range."""
    return _built(SamplingParams.deserialize, unpack(packed), "sampling params")


def pack_record(record: DynamicInferenceRequestRecord) -> bytes:
    """Return `record` as the bytes of an EngineReply."""
    return pack(record.serialize())


def unpack_record(packed: bytes) -> DynamicInferenceRequestRecord:
    """Return what `pack_record` wrote, under the request id of the engine that wrote it.

    Raises ProtocolError if it is no record, or another RolloutError naming an illegal value.
    """
    encoded = unpack(packed, max_items=_MAX_RECORD_ITEMS)
    return _built(DynamicInferenceRequestRecord.deserialize, encoded, "a record")


def _built(build: Callable[[Mapping[str, Any]], T], encoded: Any, what: str) -> T:
    if not isinstance(encoded, dict):
        raise ProtocolError(f"not {what}: a {type(encoded).__name__}")
    try:
        return build(encoded)
    except RolloutError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as fault:
        # The codecs below read what they wrote; bytes from a socket may be anything.
        raise ProtocolError(f"not {what}: {fault!r:.200}") from fault
