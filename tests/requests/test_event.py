"""Events: legal payloads, and encoding between processes."""

from __future__ import annotations

import dataclasses
import time

import msgpack
import pytest

from rollout.errors import (
    BlockOverflowError,
    EventPayloadError,
    MaxSequenceLengthOverflowError,
    ProtocolError,
    RemoteError,
    TokenLimitClamped,
)
from rollout.requests import DynamicInferenceEvent, DynamicInferenceEventType

EventType = DynamicInferenceEventType
ERROR_TYPES = [EventType.ERROR_TRANSIENT, EventType.ERROR_NONTRANSIENT]
BARE_TYPES = [t for t in EventType if t not in [*ERROR_TYPES, EventType.GENERATED_TOKEN]]


def travel(event: DynamicInferenceEvent) -> DynamicInferenceEvent:
    """Return `event` as another process receives it."""
    return DynamicInferenceEvent.deserialize(msgpack.unpackb(msgpack.packb(event.serialize())))


def test_an_event_happens_now_unless_a_timestamp_is_given():
    before = time.time()
    event = DynamicInferenceEvent(type=EventType.PAUSE)
    assert before <= event.timestamp <= time.time()
    assert DynamicInferenceEvent(type=EventType.PAUSE, timestamp=3.5).timestamp == 3.5


@pytest.mark.parametrize("event_type", BARE_TYPES)
@pytest.mark.parametrize("payload", [{}, {"token_id": 1}, ValueError("x"), 0])
def test_event_without_payload_refuses_any(event_type, payload):
    with pytest.raises(EventPayloadError, match=f"{event_type.name} takes no payload"):
        DynamicInferenceEvent(type=event_type, payload=payload)


@pytest.mark.parametrize("payload", [None, {}, {"token": 1}, 7, ValueError("x")])
def test_token_event_needs_its_token_id(payload):
    with pytest.raises(EventPayloadError, match="token_id"):
        DynamicInferenceEvent(type=EventType.GENERATED_TOKEN, payload=payload)


@pytest.mark.parametrize("event_type", ERROR_TYPES)
@pytest.mark.parametrize("payload", [None, "out of blocks", {"token_id": 1}])
def test_error_event_needs_an_exception(event_type, payload):
    with pytest.raises(EventPayloadError, match="an exception"):
        DynamicInferenceEvent(type=event_type, payload=payload)


def test_payload_error_is_a_value_error():
    with pytest.raises(ValueError, match="takes no payload"):
        DynamicInferenceEvent(type=EventType.FINISH, payload=1)


@pytest.mark.parametrize("event_type", BARE_TYPES)
def test_event_without_payload_survives_the_wire(event_type):
    event = travel(DynamicInferenceEvent(type=event_type, timestamp=1.25))
    assert (event.type, event.timestamp, event.payload) == (event_type, 1.25, None)


def test_token_event_survives_the_wire():
    payload = {"token_id": 7, "blocks_total": 12}
    event = DynamicInferenceEvent(type=EventType.GENERATED_TOKEN, payload=payload)
    assert travel(event).payload == payload


@pytest.mark.parametrize(
    ("error", "event_type", "is_transient"),
    [
        (BlockOverflowError(3, "full"), EventType.ERROR_TRANSIENT, True),
        (TokenLimitClamped(3, "8 of 9"), EventType.ERROR_TRANSIENT, True),
        (MaxSequenceLengthOverflowError(3), EventType.ERROR_NONTRANSIENT, False),
    ],
)
def test_known_error_survives_the_wire(error, event_type, is_transient):
    payload = travel(DynamicInferenceEvent(type=event_type, payload=error)).payload
    assert type(payload) is type(error)
    assert (payload.request_id, payload.message) == (3, error.message)
    assert payload.is_transient is is_transient


@pytest.mark.parametrize("event_type", ERROR_TYPES)
def test_unknown_error_comes_back_generic_with_the_flag_of_its_event(event_type):
    event = travel(DynamicInferenceEvent(type=event_type, payload=OSError("no route")))
    assert type(event.payload) is RemoteError
    assert (event.payload.type_name, event.payload.message) == ("OSError", "no route")
    assert event.payload.is_transient is (event_type is EventType.ERROR_TRANSIENT)


@pytest.mark.parametrize("obj", [{}, {"type": "PAUSE"}, {"type": "NAP", "timestamp": 0.0}])
def test_malformed_event_is_refused(obj):
    with pytest.raises(ProtocolError):
        DynamicInferenceEvent.deserialize(obj)


def test_event_cannot_be_edited():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DynamicInferenceEvent(type=EventType.PAUSE).timestamp = 0.0


def test_event_text_names_type_and_payload():
    event = DynamicInferenceEvent(
        type=EventType.GENERATED_TOKEN, timestamp=1.5, payload={"token_id": 7}
    )
    assert str(event) == "[1.500] GENERATED_TOKEN, token=7"
    event = DynamicInferenceEvent(
        type=EventType.ERROR_NONTRANSIENT, timestamp=1.5, payload=ValueError("no")
    )
    assert str(event) == "[1.500] ERROR_NONTRANSIENT, ValueError('no')"
    assert str(DynamicInferenceEvent(type=EventType.PAUSE, timestamp=2.0)) == "[2.000] PAUSE"
