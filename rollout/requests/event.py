"""Events of a request: what happened to it, and when.

OutputProcessor adds them. In addition `rollout.requests.record` adds a missing ADD_ENGINE event,
`rollout.generated_text` adds a tokenizer's errors, and `rollout.apis.streaming` adds the events of
a request that no engine ran.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from rollout.errors import (
    DetokenizeError,
    EventPayloadError,
    ProtocolError,
    decode_error,
    encode_error,
)


class DynamicInferenceEventType(Enum):
    """Type of an event. It is serialized by name, not by number."""

    ADD_ENGINE = auto()  # once per request, when it enters the engine's queue
    ADD_CONTEXT = auto()  # with the last chunk of its prefill
    GENERATED_TOKEN = auto()
    PAUSE = auto()
    EVICT = auto()
    FINISH = auto()
    FAIL = auto()
    ERROR_TRANSIENT = auto()
    ERROR_NONTRANSIENT = auto()


_ERROR_EVENTS = (
    DynamicInferenceEventType.ERROR_TRANSIENT,
    DynamicInferenceEventType.ERROR_NONTRANSIENT,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DynamicInferenceEvent:
    """One event. Raises EventPayloadError for a payload that its type does not take.

    timestamp: seconds since the epoch; the current time by default.
    payload: an exception for ERROR_*, a dictionary with `token_id` for GENERATED_TOKEN, else None.
    """

    type: DynamicInferenceEventType
    timestamp: float = field(default_factory=time.time)
    payload: Any = None

    def __post_init__(self) -> None:
        payload = self.payload
        if self.type is DynamicInferenceEventType.GENERATED_TOKEN:
            is_legal = isinstance(payload, dict) and "token_id" in payload
            wanted = "a dictionary with token_id"
        elif self.type in _ERROR_EVENTS:
            is_legal, wanted = isinstance(payload, BaseException), "an exception"
        else:
            is_legal, wanted = payload is None, "no payload"
        if not is_legal:
            raise EventPayloadError(f"{self.type.name} takes {wanted}, got {payload!r}")

    def __str__(self) -> str:
        detail = "" if self.payload is None else f", {self.payload!r}"
        if self.type is DynamicInferenceEventType.GENERATED_TOKEN:
            detail = f", token={self.payload['token_id']}"
        return f"[{self.timestamp:.3f}] {self.type.name}{detail}"

    def serialize(self) -> dict[str, Any]:
        """Return type name, timestamp and payload for msgpack. `encode_error` encodes
        exceptions."""
        payload = self.payload
        if self.type in _ERROR_EVENTS:
            is_transient = self.type is DynamicInferenceEventType.ERROR_TRANSIENT
            payload = encode_error(payload, is_transient=is_transient)
        return {"type": self.type.name, "timestamp": self.timestamp, "payload": payload}

    @classmethod
    def deserialize(cls, obj: Mapping[str, Any]) -> DynamicInferenceEvent:
        """Return the event that `serialize` encoded. An error of unknown type becomes a
        RemoteError. Raises ProtocolError for an unknown event type or missing keys, and
        EventPayloadError for a payload of the wrong kind."""
        try:
            event_type = DynamicInferenceEventType[obj["type"]]
            timestamp, payload = obj["timestamp"], obj["payload"]
        except KeyError as fault:
            raise ProtocolError(f"not an encoded event: {obj!r}") from fault
        if event_type in _ERROR_EVENTS:
            payload = decode_error(payload)
        return cls(type=event_type, timestamp=timestamp, payload=payload)


@dataclass(kw_only=True, eq=False)
class EventLog:
    """The events of one segment, oldest first. `event_add_engine` is the request's ADD_ENGINE
    event, even if an earlier segment logged it."""

    events: list[DynamicInferenceEvent] = field(default_factory=list)
    event_add_engine: DynamicInferenceEvent | None = None

    def add_event(
        self, type: DynamicInferenceEventType, payload: Any | None = None
    ) -> DynamicInferenceEvent:
        """Append an event with the current time and return it. A second ADD_ENGINE event is not
        logged; the first one is returned instead."""
        if type is DynamicInferenceEventType.ADD_ENGINE and self.event_add_engine is not None:
            return self.event_add_engine
        event = DynamicInferenceEvent(type=type, payload=payload)
        self.events.append(event)
        if type is DynamicInferenceEventType.ADD_ENGINE:
            self.event_add_engine = event
        return event

    @property
    def last_error(self) -> BaseException | None:
        """The last logged error; None if no error was logged."""
        payloads = (event.payload for event in reversed(self.events))
        return next((payload for payload in payloads if isinstance(payload, BaseException)), None)

    def add_event_add_engine(self) -> DynamicInferenceEvent:
        """Log that the request entered the queue. A second call returns the first event."""
        return self.add_event(DynamicInferenceEventType.ADD_ENGINE)

    def add_event_add_context(self) -> DynamicInferenceEvent:
        """Log that the last chunk of the prompt was prefilled."""
        return self.add_event(DynamicInferenceEventType.ADD_CONTEXT)

    def add_event_generated_token(
        self,
        token: int,
        blocks_total: int | None = None,
        blocks_hashed_total: int | None = None,
        blocks_hashed_active: int | None = None,
        blocks_ref_count: int | None = None,
    ) -> DynamicInferenceEvent:
        """Log a generated token. The given block counts are added to the payload."""
        counts = {
            "blocks_total": blocks_total,
            "blocks_hashed_total": blocks_hashed_total,
            "blocks_hashed_active": blocks_hashed_active,
            "blocks_ref_count": blocks_ref_count,
        }
        given = {name: count for name, count in counts.items() if count is not None}
        payload = {"token_id": token, **given}
        return self.add_event(DynamicInferenceEventType.GENERATED_TOKEN, payload)

    def add_event_pause(self) -> DynamicInferenceEvent:
        """Log that the request waits for blocks while it keeps the blocks it has."""
        return self.add_event(DynamicInferenceEventType.PAUSE)

    def add_event_evict(self) -> DynamicInferenceEvent:
        """Log that the request lost its blocks and returned to the queue."""
        return self.add_event(DynamicInferenceEventType.EVICT)

    def add_event_finish(self) -> DynamicInferenceEvent:
        """Log that the request completed."""
        return self.add_event(DynamicInferenceEventType.FINISH)

    def add_event_fail(self) -> DynamicInferenceEvent:
        """Log that the request failed."""
        return self.add_event(DynamicInferenceEventType.FAIL)

    def add_event_error_transient(self, error: Exception) -> DynamicInferenceEvent:
        """Log an error that did not end the request."""
        return self.add_event(DynamicInferenceEventType.ERROR_TRANSIENT, error)

    def add_event_error_nontransient(self, error: Exception) -> DynamicInferenceEvent:
        """Log the error that ended the request."""
        return self.add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, error)

    def add_text_error(self, error: DetokenizeError) -> None:
        """Log the tokenizer's error before the last event, so that FINISH or FAIL stays the
        last."""
        last = self.events[-1:]
        timestamp = last[0].timestamp if last else time.time()
        event = DynamicInferenceEvent(
            type=DynamicInferenceEventType.ERROR_TRANSIENT, timestamp=timestamp, payload=error
        )
        self.events.insert(len(self.events) - len(last), event)

    @property
    def has_no_text(self) -> bool:
        """Whether a tokenizer failed on the request's tokens."""
        return any(isinstance(event.payload, DetokenizeError) for event in self.events)
