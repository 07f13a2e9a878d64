"""EngineReplies: what engines report of their attempts, as far as those still count."""

from __future__ import annotations

from msgspec.structs import replace

from rollout.coordinator.core.books import Books
from rollout.coordinator.core.placement import Placement
from rollout.coordinator.core.request_desk import RequestDesk
from rollout.coordinator.core.request_table import Phase, Request
from rollout.coordinator.core.sessions import EnginePeer
from rollout.coordinator.core.text_jobs import Detokenize
from rollout.coordinator.core.token_log import TokenGapError
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    Attempt,
    EngineReply,
    EngineReplyPartial,
    ReplyAck,
)


class EngineReplies:
    """An attempt counts if it is its request's latest and assigned to the engine that speaks."""

    def __init__(
        self, books: Books, placement: Placement, desk: RequestDesk, *, has_tokenizer: bool
    ) -> None:
        self._books, self._placement, self._desk = books, placement, desk
        self._has_tokenizer = has_tokenizer
        self._owed: dict[bytes, EnginePeer] = {}  # with ends to acknowledge

    def progress(self, engine: EnginePeer, message: EngineReplyPartial) -> None:
        """Keep the new tokens, and pass them on to a client that streams.

        Raises ProtocolError for a run that cannot follow the earlier ones.
        """
        request = self._current(engine, message)
        if request is None:
            attempt = Attempt(request_id=message.request_id, attempt=message.attempt)
            self._books.send(engine, AbortRequest(attempts=(attempt,)))
            return
        try:
            new = request.log.append(message.tokens)
        except TokenGapError:
            # The reply brings the tokens all the same; until then less can be resumed.
            self._books.counters.num_gaps += 1
            return
        if new is None or len(new) < len(message.tokens):
            self._books.counters.num_duplicates += 1
        if new is not None and request.group.is_streaming:
            forwarded = replace(
                message, request_id=request.client_request_id, attempt=0, tokens=new
            )
            self._books.send(request.client, forwarded)

    def end(self, engine: EnginePeer, message: EngineReply) -> None:
        """Answer the request. The engine may forget the attempt, whether it counts or not."""
        engine.ended.append(Attempt(request_id=message.request_id, attempt=message.attempt))
        self._owed[engine.engine_id] = engine
        request = self._current(engine, message)
        if request is None:
            return
        if self._has_tokenizer and message.record is not None:
            self._placement.release(request)
            request.phase, request.reply = Phase.DETOKENIZING, message
            job = Detokenize(request.server_id, message.record)
            self._books.text_jobs.add(request.server_id, job)
        else:
            self._desk.finish(request, message)

    def _current(
        self, engine: EnginePeer, message: EngineReplyPartial | EngineReply
    ) -> Request | None:
        """The request of an attempt that counts, else None and counted as stale or repeated."""
        request = self._books.requests.requests.get(message.request_id)
        if request is not None and request.engine is engine and request.attempt == message.attempt:
            return request
        is_repeated = (
            request is not None
            and request.attempt == message.attempt
            and request.last_engine_id == engine.engine_id
        )
        self._books.counters.num_duplicates += is_repeated
        self._books.counters.num_stale += not is_repeated
        return None

    def acknowledge(self) -> None:
        """Tell the engines of all ends that came since the last call, in one message each."""
        for engine in self._owed.values():
            if self._books.sessions.engines.get(engine.engine_id) is engine:
                self._books.send(engine, ReplyAck(attempts=tuple(engine.ended)))
            engine.ended.clear()
        self._owed.clear()
