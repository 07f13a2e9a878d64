"""PendingRequests: the requests of one client, until their replies have arrived.

Used by `rollout.coordinator.client.inference_client`. It sends submissions, aborts and
acknowledgements, sets timers of the event loop, and resolves futures.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from msgspec.structs import replace

from rollout.coordinator.client.streams import RequestFuture, StreamedTokens, set_exception
from rollout.coordinator.client.submission import Submission
from rollout.coordinator.protocol.messages import (
    MAX_SAMPLES,
    AbortRequest,
    Attempt,
    ConnectAck,
    EngineReply,
    EngineReplyPartial,
    ReplyAck,
    SubmitRequest,
    in_parts,
)
from rollout.coordinator.protocol.packed import unpack_record
from rollout.errors import CoordinatorLostError, ProtocolError, RequestAbortedError, RolloutError
from rollout.generated_text import add_text
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.text import Tokenizer
from rollout.wire import Message

Record = DynamicInferenceRequestRecord

# One message acknowledges many replies: a message for each would cost the coordinator as much as
# the reply. Until then the coordinator keeps them.
MAX_UNACKNOWLEDGED = 64
ACKNOWLEDGE_WITHIN_S = 0.01


@dataclass(slots=True, eq=False)
class _Request:
    future: RequestFuture
    text: str | None  # the prompt if it is text
    num_bytes: int
    tokens: StreamedTokens | None
    due_at: float | None
    timer: asyncio.TimerHandle | None = None
    is_sent: bool = False
    is_aborted: bool = False


class PendingRequests:
    """The futures of one client's requests, by request id. All methods run in one event loop.

    The coordinator's ConnectAck limits the number and the bytes of sent requests without a reply.
    Further requests are held here, and sent as replies come, by priority and then in the order of
    submission. If the future of a sent request is done before its reply arrives, the request is
    aborted."""

    def __init__(self, send: Callable[[Message], None], tokenizer: Tokenizer | None) -> None:
        self._send, self._tokenizer = send, tokenizer
        self.futures: dict[int, RequestFuture] = {}
        self._requests: dict[int, _Request] = {}
        self._held: list[tuple[int, int, SubmitRequest]] = []  # a heap
        self._order = count()
        self._num_sent = self._num_sent_bytes = 0  # count sent requests without a reply
        self._max_sent = self._max_sent_bytes = 0
        self._grace_s = 0.0  # how long after a deadline the coordinator may still answer
        self._to_abort: list[int] = []
        self._to_acknowledge: list[Attempt] = []

    def connected(self, ack: ConnectAck) -> None:
        """Keep the coordinator's limits and grace period."""
        self._grace_s = ack.answer_grace_s
        self._max_sent, self._max_sent_bytes = ack.max_requests, ack.max_request_bytes

    # ---- submitting

    def submit(self, submissions: Sequence[Submission]) -> list[list[RequestFuture]]:
        """Send or hold all submissions, and return a future per sample.

        All futures are cancelled if an exception such as KeyboardInterrupt comes. A single future
        fails if no frame can carry its request. It also fails if the coordinator's grace period
        after the deadline ends without a reply."""
        added: list[list[RequestFuture]] = []
        try:
            for submission in submissions:
                added.append([])
                self._add(submission, added[-1])
            self._send_held()
        except BaseException:  # even after a KeyboardInterrupt the caller has no futures
            for future in (future for futures in added for future in futures):
                future.cancel()
            raise
        return added

    def tokens_of(self, future: RequestFuture) -> StreamedTokens:
        """Return the streamed tokens of a request that was just submitted as a stream."""
        tokens = self._requests[future.request_id].tokens
        assert tokens is not None, "submitted as a stream"
        return tokens

    def _add(self, submission: Submission, futures: list[RequestFuture]) -> None:
        loop, message = asyncio.get_running_loop(), submission.message
        deadline_s = message.deadline_s
        num_bytes = _num_bytes(message) // len(message.samples)
        for sample in message.samples:
            future = RequestFuture(sample.request_id, message.prompt_tokens, loop)
            futures.append(future)
            tokens = StreamedTokens() if message.streaming else None
            request = _Request(future, submission.text, num_bytes, tokens, None)
            if deadline_s is not None:
                request.due_at = time.monotonic() + deadline_s
                request.timer = loop.call_later(deadline_s, self._deadline_passed, request)
            if tokens is not None:
                future.add_done_callback(tokens.end)
            future.add_done_callback(self._done)
            self.futures[sample.request_id] = future
            self._requests[sample.request_id] = request
        if submission.error is not None:
            self._fail_unsent(message, submission.error)
            return
        max_samples = min(self._max_sent, MAX_SAMPLES)
        for start in range(0, len(message.samples), max_samples):
            samples = message.samples[start : start + max_samples]
            part = (
                message
                if len(samples) == len(message.samples)
                else replace(message, samples=samples)
            )
            heapq.heappush(self._held, (-part.priority, next(self._order), part))

    def _send_held(self) -> None:
        """Send held requests while the coordinator's limits have room."""
        while self._held and self._has_room(self._held[0][2]):
            self._send_now(heapq.heappop(self._held)[2])

    def _has_room(self, message: SubmitRequest) -> bool:
        """Return whether the coordinator's limits have room for `message`. There is always room if
        no sent request is unfinished."""
        has_room = self._num_sent + len(message.samples) <= self._max_sent
        fits = self._num_sent_bytes + _num_bytes(message) <= self._max_sent_bytes
        return not self._num_sent or (has_room and fits)

    def _send_now(self, message: SubmitRequest) -> None:
        wanted = [
            (sample, self._requests[sample.request_id])
            for sample in message.samples
            if sample.request_id in self.futures and not self.futures[sample.request_id].done()
        ]
        if not wanted:
            return
        if self._num_sent + len(wanted) + len(self._to_acknowledge) > self._max_sent:
            self._acknowledge()  # until then the coordinator holds the ended requests
        for _, request in wanted:
            request.is_sent = True
            self._num_sent += 1
            self._num_sent_bytes += request.num_bytes
        if (due_at := wanted[0][1].due_at) is not None:
            message = replace(message, deadline_s=max(0.0, due_at - time.monotonic()))
        if len(wanted) < len(message.samples):
            message = replace(message, samples=tuple(sample for sample, _ in wanted))
        try:
            self._send(message)
        except ProtocolError as error:
            self._fail_unsent(message, error)

    def _fail_unsent(self, message: SubmitRequest, error: RolloutError) -> None:
        for sample in message.samples:
            request = self._requests.get(sample.request_id)
            if request is not None:
                self._remove(request)
                set_exception(request.future, type(error)(*error.args))

    # ---- giving up

    def _done(self, future: asyncio.Future[Record]) -> None:
        assert isinstance(future, RequestFuture)
        self.futures.pop(future.request_id, None)
        request = self._requests.get(future.request_id)
        if request is not None:
            self.abort(future.request_id)
            if request.timer is not None:
                request.timer.cancel()

    def _deadline_passed(self, request: _Request) -> None:
        """Fail a request that was not sent. A sent request fails if the grace period ends without a
        reply."""
        if not request.is_sent:
            self._remove(request)
            aborted = RequestAbortedError("the request's deadline has passed")
            set_exception(request.future, aborted)
            return
        name, grace_s = request.future.request_id, self._grace_s
        error = CoordinatorLostError(
            f"request {name} has no reply {grace_s:g} s after its deadline"
        )
        loop = asyncio.get_running_loop()
        request.timer = loop.call_later(grace_s, set_exception, request.future, error)

    def abort(self, request_id: int) -> None:
        """Abort a request, unless it has ended. A request that was not sent fails at once."""
        request = self._requests.get(request_id)
        if request is None or request.is_aborted:
            return
        if not request.is_sent:
            self._remove(request)
            set_exception(request.future, RequestAbortedError("aborted by its client"))
            return
        request.is_aborted = True
        if not self._to_abort:
            # Requests that are cancelled together are aborted by one message.
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._to_abort.append(request_id)

    def _send_aborts(self) -> None:
        aborted, self._to_abort = self._to_abort, []
        for attempts in in_parts([Attempt(request_id=i) for i in aborted if i in self._requests]):
            self._send(AbortRequest(attempts=attempts))

    def fail(self, error: RolloutError, *, quietly: bool = False) -> None:
        """Fail all futures. With `quietly`, asyncio does not report failures that nobody awaits."""
        self._held.clear()
        for request in list(self._requests.values()):
            self._remove(request)
        for future in list(self.futures.values()):
            set_exception(future, type(error)(*error.args))
            if quietly and not future.cancelled():
                future.exception()

    def _remove(self, request: _Request) -> None:
        del self._requests[request.future.request_id]
        if request.is_sent:
            self._num_sent -= 1
            self._num_sent_bytes -= request.num_bytes
        if request.timer is not None:
            request.timer.cancel()

    # ---- replies

    def take(self, messages: Sequence[EngineReply | EngineReplyPartial]) -> None:
        """Resolve the futures of replies, add tokens to streams, and send held requests. Every
        reply is acknowledged within ACKNOWLEDGE_WITHIN_S seconds, even for an unknown request."""
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
        """Return the reply's record with the client's request id, the prompt's text and the
        output's text. Raises the reply's error if there is no record, and ProtocolError if the
        record is malformed."""
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


def _num_bytes(message: SubmitRequest) -> int:
    """Return the bytes of a submission as the coordinator counts them."""
    return message.prompt_tokens.nbytes + sum(len(s.sampling_params) for s in message.samples)
