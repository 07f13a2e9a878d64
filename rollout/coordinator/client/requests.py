"""ClientRequests: what one client has submitted, until the reply to it is here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from rollout.coordinator.client.tokens import TokenSequencer, rest_of
from rollout.coordinator.dealer import CoordinatorLostError
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    Attempt,
    EngineReply,
    EngineReplyPartial,
    Message,
    ReplyAck,
    SubmitRequest,
    TokenRun,
)
from rollout.coordinator.protocol.packed import (
    unpack_record,
)
from rollout.coordinator.protocol.token_runs import join_runs
from rollout.errors import DetokenizeError, ProtocolError, RolloutError
from rollout.requests.record import DynamicInferenceRequestRecord

Record = DynamicInferenceRequestRecord

# Replies are acknowledged together: a message for each would cost the coordinator as much as the
# reply. Nobody waits for it; meanwhile the coordinator keeps them.
MAX_UNACKNOWLEDGED = 64
ACKNOWLEDGE_WITHIN_S = 0.01


class RequestFuture(asyncio.Future[Record]):
    """Of the record of one request. Cancelling it aborts the request."""

    def __init__(self, request_id: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.request_id = request_id


@dataclass(slots=True, eq=False)
class _Request:
    future: RequestFuture
    submission: SubmitRequest  # shared by its group
    due_at: float | None
    is_aborted: bool = False
    sequencer: TokenSequencer = field(default_factory=TokenSequencer)
    # None marks the end.
    pieces: asyncio.Queue[TokenRun | None] = field(default_factory=asyncio.Queue)

    def end_pieces(self, _: asyncio.Future[Record]) -> None:
        self.pieces.put_nowait(None)


class RequestStream:
    """Iterates over the tokens of one request, piece by piece; the last item is its record. Closed
    before that, it aborts the request.
    """

    def __init__(self, request: _Request, interval: int) -> None:
        self.request_id = request.future.request_id
        self._future = request.future
        self._items = _items_of(request, interval)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> TokenRun | Record:
        return await self._items.__anext__()

    async def aclose(self) -> None:
        await self._items.aclose()
        self._future.cancel()  # of one that nobody has begun to read


async def _items_of(request: _Request, interval: int) -> AsyncGenerator[TokenRun | Record, None]:
    held: list[TokenRun] = []  # fewer than `interval` tokens
    try:
        while (piece := await request.pieces.get()) is not None:
            held.append(piece)
            if sum(map(len, held)) >= interval:
                yield join_runs(held)
                held = []
        record = await request.future
        if (rest := rest_of(record, request.sequencer.num_tokens)) is not None:
            held.append(rest)
        if held:
            yield join_runs(held)
        yield record
    finally:
        request.future.cancel()


class ClientRequests:
    """Futures of requests and what must be said about them. Lives in one event loop.

    A request is kept until its reply is here, also if its future is done before: cancelled, past
    its deadline, or failed since the coordinator was lost. Then it is to be aborted.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self.futures: dict[int, RequestFuture] = {}
        self._requests: dict[int, _Request] = {}
        self._to_abort: list[int] = []
        self._to_acknowledge: list[Attempt] = []

    # ---- submitting

    def submit(self, submission: SubmitRequest, grace_s: float) -> list[RequestFuture]:
        """Send it. Returns a future per sample. Raises ProtocolError if it cannot be sent.

        The coordinator keeps the deadline; `grace_s` seconds later the futures fail by themselves.
        """
        loop = asyncio.get_running_loop()
        self._send(submission)
        deadline_s = submission.deadline_s
        due_at = None if deadline_s is None else time.monotonic() + deadline_s
        futures = []
        for sample in submission.samples:
            future = RequestFuture(sample.request_id, loop)
            self.futures[sample.request_id] = future
            request = _Request(future, submission, due_at)
            self._requests[sample.request_id] = request
            future.add_done_callback(self._let_go)
            future.add_done_callback(request.end_pieces)
            if deadline_s is not None:
                what = f"request {sample.request_id} has no reply"
                fail_after(future, deadline_s + grace_s, what)
            futures.append(future)
        return futures

    def _let_go(self, future: asyncio.Future[Record]) -> None:
        assert isinstance(future, RequestFuture)
        self.futures.pop(future.request_id, None)
        if future.request_id in self._requests:
            self.abort(future.request_id)

    def abort(self, request_id: int) -> None:
        """Ask for the end of a request, unless it has ended."""
        request = self._requests.get(request_id)
        if request is None or request.is_aborted:
            return
        request.is_aborted = True
        if not self._to_abort:
            # Those that are cancelled together go together.
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._to_abort.append(request_id)

    def _send_aborts(self) -> None:
        aborted, self._to_abort = self._to_abort, []
        attempts = tuple(Attempt(request_id=i) for i in aborted if i in self._requests)
        if attempts:
            self._send(AbortRequest(attempts=attempts))

    # ---- what comes back

    def take(self, messages: list[EngineReply | EngineReplyPartial]) -> None:
        """Hand replies to their futures and pieces to their streams. All replies, known or not, are
        acknowledged soon.
        """
        for message in messages:
            if isinstance(message, EngineReplyPartial):
                self._take_partial(message)
                continue
            self._take_reply(message)
            if not self._to_acknowledge:
                loop = asyncio.get_running_loop()
                loop.call_later(ACKNOWLEDGE_WITHIN_S, self._acknowledge)
            attempt = Attempt(request_id=message.request_id, attempt=message.attempt)
            self._to_acknowledge.append(attempt)
            if len(self._to_acknowledge) == MAX_UNACKNOWLEDGED:
                self._acknowledge()

    def _acknowledge(self) -> None:
        arrived, self._to_acknowledge = self._to_acknowledge, []
        if arrived:
            self._send(ReplyAck(attempts=tuple(arrived)))

    def _take_partial(self, message: EngineReplyPartial) -> None:
        request = self._requests.get(message.request_id)
        if request is not None and request.submission.streaming and not request.future.done():
            for run in request.sequencer.add(message.tokens):
                request.pieces.put_nowait(run)

    def _take_reply(self, reply: EngineReply) -> None:
        request = self._requests.pop(reply.request_id, None)
        if request is None or request.future.done():
            return
        try:
            request.future.set_result(_record_in(reply))
        except RolloutError as error:
            request.future.set_exception(error)

    def stream(self, future: RequestFuture, interval: int) -> RequestStream:
        """Return the stream of a request that was submitted as one, just now, in pieces of
        `interval` tokens or more.
        """
        return RequestStream(self._requests[future.request_id], interval)

    # ---- when the session changes

    def welcome(self, is_known: bool) -> None:
        """Say all again to a coordinator that is back. `is_known`: it has forgotten nothing."""
        left: dict[int, SubmitRequest] = {}  # by identity: messages have no hash
        open_ids: set[int] = set()
        for request_id, request in list(self._requests.items()):
            if not is_known and request.sequencer.num_tokens and not request.future.done():
                request.future.set_exception(
                    CoordinatorLostError(
                        f"request {request_id} was streaming when the coordinator forgot it; its "
                        "tokens cannot go on from those already handed out, submit it again"
                    )
                )
            if request.future.done() and not is_known:
                del self._requests[request_id]
            elif not request.future.done():
                open_ids.add(request_id)
                left[id(request.submission)] = request.submission
        for submission in left.values():
            self._send(self._unfinished(submission, open_ids))
        attempts = tuple(
            Attempt(request_id=i)
            for i, request in self._requests.items()
            if request.is_aborted or request.future.done()
        )
        if attempts:
            self._send(AbortRequest(attempts=attempts))
        # An abort of what the coordinator never got has no answer.
        for request_id in [i for i, r in self._requests.items() if r.future.done()]:
            del self._requests[request_id]

    def _unfinished(self, submission: SubmitRequest, open_ids: set[int]) -> SubmitRequest:
        """What is left of a submission: its open samples, and of its deadline."""
        samples = tuple(s for s in submission.samples if s.request_id in open_ids)
        due_at = self._requests[samples[0].request_id].due_at
        deadline_s = None if due_at is None else max(0.0, due_at - time.monotonic())
        return replace(submission, samples=samples, deadline_s=deadline_s)

    def fail(self, error: RolloutError, *, quietly: bool = False) -> None:
        """End all futures. Quietly: one that nobody looks at must not be reported."""
        for future in list(self.futures.values()):
            if not future.done():
                future.set_exception(type(error)(*error.args))
                if quietly:
                    future.exception()


def fail_after(future: asyncio.Future[Any], seconds: float, what: str) -> None:
    """Fail `future` if it is not done by then."""

    def expire() -> None:
        if not future.done():
            future.set_exception(CoordinatorLostError(f"{what} after {seconds:g} s"))

    timer = future.get_loop().call_later(seconds, expire)
    future.add_done_callback(lambda _: timer.cancel())


def _record_in(reply: EngineReply) -> Record:
    """Return the record under the client's request id, with the text in it.

    Raises the reply's error if there is none, ProtocolError if it cannot be read.
    """
    if reply.record is None:
        assert reply.error is not None, "checked by EngineReply"
        raise reply.error.to_error()
    record = unpack_record(reply.record)
    if not record.requests:
        raise ProtocolError(f"the record of request {reply.request_id} has no segment")
    for segment in record.requests:
        segment.request_id = reply.request_id
    if reply.error is not None:
        error = reply.error.to_error()
        is_known = any(segment.has_no_text for segment in record.requests)
        if isinstance(error, DetokenizeError) and not is_known:
            record.current.add_text_error(error)
    if reply.generated_text is not None:
        # The text is that of the whole, and a merged record's is that of its segments in order.
        written = [s for s in record.requests if s.generated_tokens] or [record.current]
        for segment in written:
            segment.generated_text = ""
        written[-1].generated_text = reply.generated_text
    return record
