"""PendingRequests: what one client has submitted, until the reply to it is here."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from rollout.coordinator.client.streams import RequestFuture, StreamedTokens
from rollout.coordinator.client.submission import Submission
from rollout.coordinator.dealer import CoordinatorLostError
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    Attempt,
    ConnectAck,
    EngineReply,
    EngineReplyPartial,
    Message,
    ReplyAck,
)
from rollout.coordinator.protocol.packed import unpack_record
from rollout.errors import ProtocolError, RequestAbortedError, RolloutError
from rollout.record_text import add_text
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.text import Tokenizer

Record = DynamicInferenceRequestRecord

# Replies are acknowledged together: a message for each would cost the coordinator as much as the
# reply. Nobody waits for it; meanwhile the coordinator keeps them.
MAX_UNACKNOWLEDGED = 64
ACKNOWLEDGE_WITHIN_S = 0.01
# What one SubmitRequest can hold.
_MAX_SAMPLES = 2**16


@dataclass(slots=True, eq=False)
class _Request:
    future: RequestFuture
    text: str | None  # of its prompt
    num_bytes: int
    tokens: StreamedTokens | None
    is_sent: bool = False
    is_aborted: bool = False
    timer: asyncio.TimerHandle | None = None


class PendingRequests:
    """Futures of requests, and what must be said about them. Lives in one event loop.

    Requests beyond what the coordinator takes of one client are held here, and sent as replies
    come: higher priorities first, then in the order of their submission. One that was sent is kept
    until its reply is here, also if its future is done before: cancelled, past its deadline, or
    failed. Then it is to be aborted.
    """

    def __init__(
        self, send: Callable[[Message], None], tokenizer: Tokenizer | None, grace_s: float
    ) -> None:
        """`grace_s`: how long after a deadline the coordinator may still answer."""
        self._send, self._tokenizer, self._grace_s = send, tokenizer, grace_s
        self.futures: dict[int, RequestFuture] = {}
        self._requests: dict[int, _Request] = {}
        self._held: list[tuple[int, int, Submission]] = []  # a heap
        self._order = count()
        self._num_sent = self._num_sent_bytes = 0  # of those whose replies are not here
        self._max_sent = self._max_sent_bytes = 0
        self._to_abort: list[int] = []
        self._to_acknowledge: list[Attempt] = []

    def welcome(self, ack: ConnectAck) -> None:
        """The coordinator says how much it takes."""
        self._max_sent, self._max_sent_bytes = ack.max_requests, ack.max_request_bytes

    # ---- submitting

    def submit(self, submissions: Sequence[Submission]) -> list[list[RequestFuture]]:
        """Send, or hold, all of them or none. Returns a future per sample.

        What no frame can carry fails by itself. So does, `grace_s` seconds after its deadline, a
        request that the coordinator does not answer.
        """
        added: list[list[RequestFuture]] = []
        try:
            for submission in submissions:
                added.append([])
                self._add(submission, added[-1])
            self._send_held()
        except BaseException:  # also a KeyboardInterrupt
            for future in (future for futures in added for future in futures):
                future.cancel()
            raise
        return added

    def tokens_of(self, future: RequestFuture) -> StreamedTokens:
        """Of a request that was submitted as a stream, just now."""
        tokens = self._requests[future.request_id].tokens
        assert tokens is not None, "submitted as a stream"
        return tokens

    def _add(self, submission: Submission, futures: list[RequestFuture]) -> None:
        loop = asyncio.get_running_loop()
        num_bytes = submission.num_bytes // len(submission.samples)
        for sample in submission.samples:
            future = RequestFuture(sample.request_id, loop)
            futures.append(future)
            future.add_done_callback(self._done)
            request = _Request(future, submission.text, num_bytes, None)
            if submission.streaming:
                request.tokens = StreamedTokens()
                future.add_done_callback(request.tokens.end)
            if submission.due_at is not None:
                seconds = max(0.0, submission.due_at - time.monotonic())
                request.timer = loop.call_later(seconds, self._deadline_passed, request, seconds)
            self.futures[sample.request_id] = future
            self._requests[sample.request_id] = request
        if submission.error is not None:
            self._fail(submission, submission.error)
            return
        for part in submission.parts(min(self._max_sent, _MAX_SAMPLES)):
            heapq.heappush(self._held, (-part.priority, next(self._order), part))

    def _send_held(self) -> None:
        """Send what there is room for."""
        while self._held:
            submission = self._held[0][2]
            num_bytes = submission.num_bytes
            if self._num_sent and (
                self._num_sent + len(submission.samples) > self._max_sent
                or self._num_sent_bytes + num_bytes > self._max_sent_bytes
            ):
                return
            # The coordinator counts a request until its reply is acknowledged.
            if (
                self._num_sent + len(self._to_acknowledge) + len(submission.samples)
                > self._max_sent
            ):
                self._acknowledge()
            heapq.heappop(self._held)
            self._send_submission(submission)

    def _send_submission(self, submission: Submission) -> None:
        ids = [s.request_id for s in submission.samples if s.request_id in self.futures]
        requests = [self._requests[i] for i in ids if not self.futures[i].done()]
        if not requests:
            return
        left = {request.future.request_id for request in requests}
        samples = tuple(s for s in submission.samples if s.request_id in left)
        for request in requests:
            request.is_sent = True
            self._num_sent += 1
            self._num_sent_bytes += request.num_bytes
        try:
            self._send(submission.message(samples))
        except ProtocolError as error:
            self._fail(submission, error)

    def _fail(self, submission: Submission, error: RolloutError) -> None:
        """These were never sent."""
        for sample in submission.samples:
            request = self._requests.get(sample.request_id)
            if request is not None:
                self._remove(request)
                _set_exception(request.future, type(error)(*error.args))

    # ---- giving up

    def _done(self, future: asyncio.Future[Record]) -> None:
        assert isinstance(future, RequestFuture)
        self.futures.pop(future.request_id, None)
        request = self._requests.get(future.request_id)
        if request is not None:
            self.abort(future.request_id)
            if request.timer is not None:
                request.timer.cancel()

    def _deadline_passed(self, request: _Request, seconds: float) -> None:
        """The coordinator keeps the deadline of what was sent; it may have gone meanwhile."""
        if not request.is_sent:
            self._remove(request)
            aborted = RequestAbortedError("the request's deadline has passed")
            _set_exception(request.future, aborted)
            return
        limit_s = seconds + self._grace_s
        what = f"request {request.future.request_id} has no reply after {limit_s:g} s"
        loop, error = request.future.get_loop(), CoordinatorLostError(what)
        request.timer = loop.call_later(self._grace_s, _set_exception, request.future, error)

    def abort(self, request_id: int) -> None:
        """Ask for the end of a request, unless it has ended. One that was not sent ends at once."""
        request = self._requests.get(request_id)
        if request is None or request.is_aborted:
            return
        if not request.is_sent:
            self._remove(request)
            _set_exception(request.future, RequestAbortedError("aborted by its client"))
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

    def fail(self, error: RolloutError, *, quietly: bool = False) -> None:
        """End all futures. Quietly: one that nobody looks at must not be reported."""
        self._held.clear()
        self._requests.clear()
        for future in list(self.futures.values()):
            _set_exception(future, type(error)(*error.args))
            if quietly and not future.cancelled():
                future.exception()

    def _remove(self, request: _Request) -> None:
        """Forget a request whose reply is here, or that was not sent."""
        del self._requests[request.future.request_id]
        if request.is_sent:
            self._num_sent -= 1
            self._num_sent_bytes -= request.num_bytes
        if request.timer is not None:
            request.timer.cancel()

    # ---- what comes back

    def take(self, messages: Sequence[EngineReply | EngineReplyPartial]) -> None:
        """Hand replies to their futures and tokens to their streams, and send what there is room
        for then. All replies, known or not, are acknowledged soon.
        """
        for message in messages:
            if isinstance(message, EngineReplyPartial):
                self._take_partial(message)
            else:
                self._take_reply(message)
        if self._held:
            self._send_held()

    def _take_partial(self, message: EngineReplyPartial) -> None:
        request = self._requests.get(message.request_id)
        if request is not None and request.tokens is not None and not request.future.done():
            request.tokens.add(message.tokens)

    def _take_reply(self, reply: EngineReply) -> None:
        if not self._to_acknowledge:
            loop = asyncio.get_running_loop()
            loop.call_later(ACKNOWLEDGE_WITHIN_S, self._acknowledge)
        self._to_acknowledge.append(Attempt(request_id=reply.request_id, attempt=reply.attempt))
        if len(self._to_acknowledge) >= MAX_UNACKNOWLEDGED:
            self._acknowledge()
        request = self._requests.get(reply.request_id)
        if request is None:
            return
        self._remove(request)
        if request.future.done():
            return
        try:
            request.future.set_result(self._record_in(reply, request))
        except RolloutError as error:
            request.future.set_exception(error)

    def _acknowledge(self) -> None:
        arrived, self._to_acknowledge = self._to_acknowledge, []
        if arrived:
            self._send(ReplyAck(attempts=tuple(arrived)))

    def _record_in(self, reply: EngineReply, request: _Request) -> Record:
        """Return the record under the client's request id, with its texts.

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
        if request.text is not None:
            record[0].prompt = request.text
        add_text(record, self._tokenizer)
        return record


def _set_exception(future: RequestFuture, error: RolloutError) -> None:
    if not future.done():
        future.set_exception(error)
