"""RequestLifecycle: a request from its submission to the acknowledgement of its reply.

Used by `core`, `clients`, `commands` and `fleet` of `rollout.coordinator.core`. It changes the
RequestTable and sets timers. Messages go to the outbox of the Context.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollout.coordinator.core.context import Context
from rollout.coordinator.core.dispatcher import Dispatcher, count_tokens
from rollout.coordinator.core.request_table import (
    ClientSession,
    EngineSession,
    Request,
    RequestTable,
    Session,
    TokenGapError,
    num_bytes_of,
)
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    AssignRequest,
    Attempt,
    EngineReply,
    EngineReplyPartial,
    Progress,
    ReplyAck,
    Sample,
    SubmitRequest,
    WireError,
)
from rollout.errors import EngineStateError, RequestAbortedError, RolloutError
from rollout.requests.token_runs import TokenRun
from rollout.wire import Message


class RequestLifecycle:
    """Accepts, answers and removes requests. Each request is accepted once.

    An attempt is one assignment of a request to an engine. An engine's message counts only if it
    names the request's latest attempt, and the request is assigned to that engine. A reply is kept
    until the client acknowledges it."""

    def __init__(self, context: Context, table: RequestTable, dispatcher: Dispatcher) -> None:
        self._context, self._table, self._dispatcher = context, table, dispatcher
        self._is_open = True  # whether new requests are accepted

    # ---- submissions

    def submit(self, client: ClientSession, message: SubmitRequest, now: float) -> None:
        """Accept the new samples. Send the replies or tokens of known samples again."""
        counters, new = self._context.counters, []
        for sample in message.samples:
            if sample.request_id in client.requests:
                self.resend(client, sample.request_id)
            elif sample.request_id not in client.answered:
                new.append(sample)
        counters.num_duplicates += len(message.samples) - len(new)
        if not new:
            return
        refusal = self._refusal(client)
        if refusal is None:
            self._accept(client, message, new, now)
            return
        for sample in new:
            self.refuse(client, _failure(sample.request_id, WireError.of(refusal)))

    def refuse(self, client: ClientSession, failure: EngineReply) -> None:
        """Send the failure of a request that is not accepted. Sends nothing if the request id is
        known."""
        if failure.request_id not in client.requests and failure.request_id not in client.answered:
            self._context.counters.num_refused += 1
            self._context.send(client, failure)

    def _refusal(self, client: ClientSession) -> RolloutError | None:
        """Return the error if no sample can be accepted now, or None."""
        # InferenceClient never reaches a bound of one client: its ConnectAck names these bounds.
        limits = self._context.limits
        if not self._is_open:
            return EngineStateError("the engines are stopped; no request is accepted any more")
        if client.num_unfinished >= limits.max_client_requests:
            reason = f"max_client_requests={limits.max_client_requests} requests are unfinished"
        elif len(self._table.requests) >= limits.max_requests:
            reason = f"max_requests={limits.max_requests} requests of all clients are held"
        elif client.request_bytes >= limits.max_client_request_bytes:
            held, bound = client.request_bytes, limits.max_client_request_bytes
            reason = f"{held} bytes of prompts are unfinished, max_client_request_bytes={bound}"
        elif client.kept_bytes >= limits.max_kept_reply_bytes:
            held, bound = client.kept_bytes, limits.max_kept_reply_bytes
            reason = f"{held} bytes of replies are not acknowledged, max_kept_reply_bytes={bound}"
        else:
            return None
        error = RolloutError(f"{reason}; submit again when replies are acknowledged")
        error.is_transient = True
        return error

    def _accept(
        self, client: ClientSession, message: SubmitRequest, samples: list[Sample], now: float
    ) -> None:
        hashes = self._dispatcher.hash_prompt(message.prompt_tokens)
        num_prompt_tokens = len(message.prompt_tokens)
        num_tokens = [count_tokens(num_prompt_tokens, s.sampling_params) for s in samples]
        group = self._table.add(client, message, samples, hashes, num_tokens)
        self._context.counters.num_requests += len(samples)
        if message.deadline_s is not None:
            self._context.timers.set(("deadline", group.group_id), now + message.deadline_s)
        self._dispatcher.enqueue(group.waiting.values(), now)

    # ---- reports of engines

    def progress(self, engine: EngineSession, message: Progress, now: float) -> None:
        """Keep the new tokens of an engine's requests, and send them to clients that stream. Raises
        ProtocolError if a run of tokens cannot follow the earlier runs."""
        for request_id, attempt, run in message.runs.apart():
            self._progress(engine, Attempt(request_id=request_id, attempt=attempt), run)

    def _progress(self, engine: EngineSession, attempt: Attempt, run: TokenRun) -> None:
        request = self._current(engine, attempt)
        if request is None:
            engine.abort(attempt)
            return
        counters = self._context.counters
        is_streaming = request.group.is_streaming
        if run.end > len(request.log):
            self._dispatcher.progressed(request, engine)
        num_bytes = self._table.num_log_bytes + num_bytes_of(run)
        if num_bytes > self._context.limits.max_token_log_bytes and not is_streaming:
            counters.num_gaps += 1
            return
        try:
            new = self._table.log_tokens(request, run)
        except TokenGapError:
            # The reply will have the tokens; until then fewer can be resumed.
            counters.num_gaps += 1
            return
        counters.num_duplicates += new is None or len(new) < len(run)
        if new is not None and is_streaming:
            partial = EngineReplyPartial(request_id=request.client_request_id, tokens=new)
            self._context.send(request.client, partial)

    def end(self, engine: EngineSession, message: EngineReply, now: float) -> None:
        """Answer the request of an attempt that has ended at its engine. The engine gets an
        acknowledgement, even for an outdated attempt."""
        attempt = Attempt(request_id=message.request_id, attempt=message.attempt)
        engine.acknowledge(attempt)
        request = self._current(engine, attempt)
        if request is None:
            return
        is_overdue = request.is_overdue and message.is_failed
        own = EngineReply(
            request_id=request.client_request_id,
            record=message.record,
            error=request.abort_error if is_overdue else message.error,
            is_failed=message.is_failed,
        )
        self._answer(request, own)

    def _current(self, engine: EngineSession, named: Attempt) -> Request | None:
        """Return the request whose current attempt is `named`, or None if the attempt is outdated.
        Counts an outdated or repeated message."""
        request = self._table.requests.get(named.request_id)
        if request is not None and request.attempt == named.attempt:
            if request.engine is engine:
                return request
            if request.last_engine_id == engine.engine_id:
                self._context.counters.num_duplicates += 1
                return None
        self._context.counters.num_stale += 1
        return None

    # ---- failed engines

    def requeue(self, requests: Iterable[Request], now: float) -> None:
        """Queue the requests of an engine that has left. A request fails instead if it was being
        aborted, or if `max_lost_attempts` engines have failed while they ran it."""
        # Other requests were assigned, answered or removed meanwhile.
        waiting = [request for request in requests if request.is_waiting]
        for request in waiting:
            num_lost = len(request.lost_attempts)
            if request.abort_error is not None:
                self.fail(request, request.abort_error)
            elif num_lost >= self._context.limits.max_lost_attempts:
                error = RolloutError(
                    f"{num_lost} engines failed while they ran this request; it is not given to "
                    "another one"
                )
                self.fail(request, WireError.of(error))
        self._dispatcher.enqueue([request for request in waiting if request.is_waiting], now)

    # ---- aborts and deadlines

    def abort(self, client: ClientSession, message: AbortRequest, now: float) -> None:
        """Abort requests of a client. Each aborted request is answered by a reply."""
        error = WireError.of(RequestAbortedError("aborted by its client"))
        for named in message.attempts:
            request = client.requests.get(named.request_id)
            if request is None:
                self._context.counters.num_unexpected += 1
            else:
                self._abort(request, error, now)

    def deadline_passed(self, group_id: int, now: float) -> None:
        error = WireError.of(RequestAbortedError("the request's deadline has passed"))
        for request in list(self._table.groups[group_id].unfinished.values()):
            self._abort(request, error, now)
            request.is_overdue = True

    def orphaned(self, group_id: int, now: float) -> None:
        """Fail the waiting requests of a group for which no engine was ready in time."""
        error = WireError.of(self._dispatcher.orphan_error())
        group = self._table.groups.get(group_id)
        for request in [] if group is None else list(group.waiting.values()):
            self.fail(request, error)

    def grace_passed(self, server_id: int, now: float) -> None:
        """Fail an aborted request whose engine has not answered in time."""
        request = self._table.requests[server_id]
        assert request.abort_error is not None, "only an aborted request has a grace period"
        # Also while its engine is registering again and would get it back.
        self.fail(request, request.abort_error)

    def _abort(self, request: Request, error: WireError, now: float) -> None:
        """Ask the request's engine to abort the request. A request without an engine fails at
        once."""
        if request.is_waiting:
            self.fail(request, error)
        elif request.engine is not None and request.abort_error is None:
            request.abort_error = error
            grace_at = now + self._context.limits.abort_grace_s
            self._context.timers.set(("grace", request.server_id), grace_at)
            request.engine.abort(request.current_attempt())

    def abandon_all(self, client: ClientSession) -> None:
        """Abort the requests of a client that has left, and drop the client's replies."""
        for request in list(client.requests.values()):
            engine, is_unfinished = request.engine, request.reply is None
            if engine is not None:
                engine.abort(request.current_attempt())
            self._table.remove(request)
            if is_unfinished:
                self._context.counters.num_abandoned += 1
                self._ended(request, engine)

    def unsendable(self, session: Session | None, message: Message, error: WireError) -> None:
        """Fail with `error` the requests of a message that no frame can carry."""
        if isinstance(message, AssignRequest):
            for sample in message.samples:
                request = self._table.requests.get(sample.request_id)
                if request is None or request.engine is None or request.attempt != sample.attempt:
                    continue
                request.engine.withdraw()
                self.fail(request, error)
        elif isinstance(message, EngineReply) and isinstance(session, ClientSession):
            request = session.requests.get(message.request_id)
            if request is not None:
                reply = _failure(message.request_id, error)
                self._table.replace_reply(request, reply)
                self._context.send(session, reply)

    def fail_all(self, error: WireError) -> None:
        """Fail every unfinished request. Later submissions are refused."""
        self._is_open = False
        for request in list(self._table.requests.values()):
            if request.reply is None:
                self.fail(request, error)

    # ---- answers

    def fail(self, request: Request, error: WireError) -> None:
        """Answer a request with an error, and abort its attempt at the engine that has it."""
        if request.engine is not None:
            request.engine.abort(request.current_attempt())
        self._answer(request, _failure(request.client_request_id, error))

    def _answer(self, request: Request, reply: EngineReply) -> None:
        counters, engine = self._context.counters, request.engine
        if reply.is_failed:
            counters.num_failed += 1
        else:
            counters.num_completed += 1
        self._table.finish(request, reply)
        self._ended(request, engine)
        self._context.send(request.client, reply)

    def _ended(self, request: Request, engine: EngineSession | None) -> None:
        timers, group = self._context.timers, request.group
        self._dispatcher.released(request, engine)
        if not group.unfinished:
            timers.discard(("deadline", group.group_id))
        if request.abort_error is not None:
            timers.discard(("grace", request.server_id))

    def acknowledged(self, client: ClientSession, message: ReplyAck, now: float) -> None:
        """Remove the requests whose replies have arrived at the client."""
        for named in message.attempts:
            request = client.requests.get(named.request_id)
            if request is None or request.reply is None:
                self._context.counters.num_unexpected += 1
                continue
            client.acknowledge(named.request_id)
            self._table.remove(request)

    def resend(self, client: ClientSession, request_id: int, offset: int = 0) -> None:
        """Send the reply again, or the streamed tokens from `offset` on if there is no reply."""
        request = client.requests[request_id]
        if request.reply is not None:
            self._context.send(client, request.reply)
        elif request.group.is_streaming and (tokens := request.log.whole()) is not None:
            tokens = tokens.from_offset(offset)
            self._context.send(client, EngineReplyPartial(request_id=request_id, tokens=tokens))


def _failure(client_request_id: int, error: WireError) -> EngineReply:
    return EngineReply(request_id=client_request_id, error=error, is_failed=True)
