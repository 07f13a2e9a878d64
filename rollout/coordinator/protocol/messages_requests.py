"""Requests and what comes back of them.

A request is named by (request_id, attempt) on both links. Between client and coordinator the id is
the client's and the attempt is 0; between coordinator and engine the id is the coordinator's, and
each assignment of the request is another attempt. A message forwarded from one link to the other
changes its name, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from rollout.coordinator.protocol.field_codecs import WireData, wire_data
from rollout.coordinator.protocol.field_types import (
    Count,
    Int,
    Length,
    Seconds,
    Seed,
    Tokens,
)
from rollout.coordinator.protocol.messages_control import WireError
from rollout.coordinator.protocol.token_runs import TokenRun
from rollout.errors import ProtocolError


@wire_data
class Attempt(WireData):
    """One assignment of one request. Of two attempts of a request the larger one counts."""

    request_id: Count
    attempt: Count = 0


@wire_data
class Sample(WireData):
    """One request of a group. `sampling_params`: packed by `pack_params`, for the engine to read.

    seed: fixed by the client; None lets the engine derive one. resumed: all tokens of earlier
    attempts, from offset 0; None for a fresh request.
    """

    request_id: Count
    attempt: Count = 0
    sampling_params: bytes
    seed: Seed | None = None
    resumed: TokenRun | None = None

    def __post_init__(self) -> None:
        if self.resumed is not None and self.resumed.offset:
            raise ProtocolError(f"Sample: resumed tokens start at {self.resumed.offset}, not 0")


Samples = Annotated[tuple[Sample, ...], Length(1, 2**16)]


@wire_data
class SubmitRequest(WireData):
    """Client -> coordinator: samples of one prompt, which go to one rank. Idempotent by name.

    prompt: text, or token ids int32 [n]. priority: higher first. deadline_s: from arrival.
    streaming: send partial replies on to the client.
    """

    samples: Samples
    prompt: str | Tokens
    priority: Int = 0
    deadline_s: Seconds | None = None
    streaming: bool = False

    def __post_init__(self) -> None:
        _check_names("SubmitRequest", self.samples)
        for sample in self.samples:
            if sample.attempt or sample.resumed is not None:
                raise ProtocolError(
                    "SubmitRequest: a client's request is attempt 0, with no tokens"
                )


@wire_data
class AssignRequest(WireData):
    """Coordinator -> engine: run these samples of one prompt.

    prompt_tokens: int32 [n], as tokenized once by the coordinator; prompt: its text if it was text.
    """

    samples: Samples
    prompt_tokens: Tokens
    prompt: str | None = None
    priority: Int = 0

    def __post_init__(self) -> None:
        _check_names("AssignRequest", self.samples)


@wire_data
class EngineReplyPartial(WireData):
    """Progress: engine -> coordinator, and on to a client that streams."""

    request_id: Count
    attempt: Count = 0
    tokens: TokenRun


@wire_data
class EngineReply(WireData):
    """The end of a request: engine -> coordinator -> client. The sender keeps it until ReplyAck.

    record: packed by `pack_record`, or None if there is none, then `error` says why. is_failed: the
    record's status is FAILED, or there is none. generated_text: put in by the coordinator, which
    does not open the record for it; if its tokenizer raised, that is the `error` beside the record.
    """

    request_id: Count
    attempt: Count = 0
    record: bytes | None = None
    error: WireError | None = None
    is_failed: bool = False
    generated_text: str | None = None

    def __post_init__(self) -> None:
        if self.record is None and (self.error is None or not self.is_failed):
            raise ProtocolError("EngineReply: without a record it needs an error and is_failed")


@wire_data
class ReplyAck(WireData):
    """Client -> coordinator -> engine: these replies are safe here and may be forgotten there."""

    attempts: tuple[Attempt, ...]


@wire_data
class AbortRequest(WireData):
    """Client -> coordinator -> engine: end these. Each is answered by its EngineReply.

    The coordinator also sends it for attempts that count no more, and drops what comes back.
    """

    attempts: tuple[Attempt, ...]


def _check_names(message: str, samples: Sequence[Sample]) -> None:
    """Raise ProtocolError if two samples have one request id."""
    if len(samples) == 1:
        return
    ids = [sample.request_id for sample in samples]
    if len(set(ids)) != len(ids):
        raise ProtocolError(f"{message}: request ids repeat in {ids[:16]}")
