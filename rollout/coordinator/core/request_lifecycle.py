"""RequestLifecycle: what happens to a request, from its submission to its acknowledgement."""

from __future__ import annotations

from collections.abc import Iterable

from rollout.coordinator.core.context import Context
from rollout.coordinator.core.dispatcher import Dispatcher
from rollout.coordinator.core.request_table import (
    Phase,
    Request,
    RequestTable,
    TokenGapError,
    num_bytes_of,
)
from rollout.coordinator.core.sessions import ClientSession, EngineSession, Session
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    AssignRequest,
    Attempt,
    EngineReply,
    EngineReplyPartial,
    Message,
    Progress,
    ReplyAck,
    Sample,
    SubmitRequest,
    WireError,
)
from rollout.coordinator.protocol.token_runs import TokenRun
from rollout.errors import (
    EngineStateError,
    RequestAbortedError,
    RolloutError,
)


class RequestLifecycle:
    """A name that is known is never taken a second time. An attempt counts if it is its request's
    latest one and assigned to the engine that speaks. A reply is kept until it is acknowledged."""

    def __init__(self, context: Context, table: RequestTable, dispatcher: Dispatcher) -> None:
        self._context, self._table, self._dispatcher = context, table, dispatcher
        self.is_open = True  # until the end, requests are taken

    # ---- submissions

    def submit(self, client: ClientSession, message: SubmitRequest, now: float) -> None:
        """Take the samples that are new; send again what is known of the others."""
        counters, new = self._context.counters, []
        for sample in message.samples:
            if sample.request_id in client.server_ids:
                self.resend(client, sample.request_id)
            elif sample.request_id not in client.answered:
                new.append(sample)
        counters.num_duplicates += len(message.samples) - len(new)
        if not new:
            return
        refusal = self._refusal(client, message)
        if refusal is None:
            self._take(client, message, new, now)
            return
        counters.num_refused += len(new)
        for sample in new:
            self._context.send(client, failure(sample.request_id, WireError.of(refusal)))

    def _refusal(self, client: ClientSession, message: SubmitRequest) -> RolloutError | None:
        """Why the samples cannot be taken now; None if they can. A client that holds back what is
        beyond its window meets none of the bounds."""
        limits = self._context.limits
        if not self.is_open:
            return EngineStateError("the engines are stopped; no request is taken any more")
        bounds = (
            (
                "requests of this client are unfinished",
                client.num_unfinished,
                "max_client_requests",
            ),
            ("requests are held for all clients", len(self._table), "max_requests"),
            ("bytes of prompts are unanswered", client.request_bytes, "max_client_request_bytes"),
            ("bytes of replies are not acknowledged", client.kept_bytes, "max_kept_reply_bytes"),
        )
        for what, held, name in bounds:
            if held >= getattr(limits, name):
                error = RolloutError(
                    f"{held} {what}, and {name} is {getattr(limits, name)}; submit again when "
                    "replies have come and are acknowledged"
                )
                error.is_transient = True
                return error
        return None

    def _take(
        self, client: ClientSession, message: SubmitRequest, samples: list[Sample], now: float
    ) -> None:
        hashes = self._dispatcher.hash_prompt(message.prompt_tokens)
        group = self._table.add(client, message, samples, hashes)
        self._context.counters.num_requests += len(samples)
        if message.deadline_s is not None:
            deadline_at = now + message.deadline_s
            self._context.timers.set(("deadline", group.group_id), deadline_at)
        self._dispatcher.enqueue(self._table.waiting(group), now)

    # ---- what engines report

    def progress(self, engine: EngineSession, message: Progress, now: float) -> None:
        """Keep the new tokens, and pass them on to clients that stream.

        Raises ProtocolError for a run that cannot follow the earlier ones.
        """
        for request_id, attempt, run in message.runs.apart():
            self._progress(engine, Attempt(request_id=request_id, attempt=attempt), run)

    def _progress(self, engine: EngineSession, attempt: Attempt, run: TokenRun) -> None:
        request = self._current(engine, attempt)
        if request is None:
            self._context.abort(engine, attempt)
            return
        counters = self._context.counters
        if run.end > len(request.log):
            self._dispatcher.progressed(request, engine)
        num_bytes = self._table.num_log_bytes + num_bytes_of(run)
        is_full = num_bytes > self._context.limits.max_token_log_bytes
        if is_full and not request.group.is_streaming:
            counters.num_gaps += 1
            return
        try:
            new = self._table.log_tokens(request, run)
        except TokenGapError:
            # The reply brings the tokens all the same; until then less can be resumed.
            counters.num_gaps += 1
            return
        counters.num_duplicates += new is None or len(new) < len(run)
        if new is not None and request.group.is_streaming:
            partial = EngineReplyPartial(request_id=request.client_request_id, tokens=new)
            self._context.send(request.client, partial)

    def end(self, engine: EngineSession, message: EngineReply, now: float) -> None:
        """Answer the request. The engine may forget the attempt, whether it counts or not."""
        attempt = Attempt(request_id=message.request_id, attempt=message.attempt)
        self._context.acknowledge(engine, attempt)
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
        """The request of an attempt that counts, else None and counted as stale or repeated."""
        request = self._table.requests.get(named.request_id)
        is_latest = request is not None and request.attempt == named.attempt
        if request is not None and is_latest and request.engine is engine:
            return request
        is_repeated = (
            request is not None and is_latest and request.last_engine_id == engine.engine_id
        )
        self._context.counters.num_duplicates += is_repeated
        self._context.counters.num_stale += not is_repeated
        return None

    # ---- lost engines

    def count_loss(self, suspects: Iterable[Request]) -> None:
        """An engine is lost, perhaps by one of these requests that it was running."""
        for request in suspects:
            request.lost_attempts |= {request.attempt}

    def requeue(self, requests: Iterable[Request], now: float) -> None:
        """Requests that an engine left wait for another; those that were being aborted end, and
        those whose engines were lost too often: a request does not go from engine to engine for
        ever."""
        waiting = [request for request in requests if self._is_waiting(request)]
        for request in waiting:
            num_lost = len(request.lost_attempts)
            if request.abort_error is not None:
                self.fail(request, request.abort_error)
            elif num_lost >= self._context.limits.max_lost_attempts:
                error = RolloutError(
                    f"{num_lost} engines were lost while they ran this request; it is not given "
                    "to another one"
                )
                self.fail(request, WireError.of(error))
        self._dispatcher.enqueue(filter(self._is_waiting, waiting), now)

    def _is_waiting(self, request: Request) -> bool:
        """Whether it has not been given to an engine, answered or forgotten meanwhile."""
        is_held = self._table.requests.get(request.server_id) is request
        return is_held and request.phase is Phase.WAITING

    # ---- giving up

    def abort(self, client: ClientSession, message: AbortRequest, now: float) -> None:
        """End these requests of a client; each is answered by its reply."""
        error = WireError.of(RequestAbortedError("aborted by its client"))
        for named in message.attempts:
            server_id = client.server_ids.get(named.request_id)
            if server_id is None:
                self._context.counters.num_unexpected += 1
            else:
                self._abort(self._table.requests[server_id], error, now)

    def deadline_passed(self, group_id: int, now: float) -> None:
        """Abort what is unfinished of a group."""
        error = WireError.of(RequestAbortedError("the request's deadline has passed"))
        for request in self._unfinished(group_id):
            self._abort(request, error, now, is_overdue=True)

    def orphaned(self, group_id: int, now: float) -> None:
        """No engine came for what waits of a group."""
        wait_s = self._context.limits.orphan_deadline_s
        error = WireError.of(RolloutError(f"no engine was there for {wait_s:g} s"))
        for request in self._unfinished(group_id):
            if request.phase is Phase.WAITING:
                self.fail(request, error)

    def grace_passed(self, server_id: int, now: float) -> None:
        """An engine has not answered an abort in time: the client need not wait for it."""
        request = self._table.requests.get(server_id)
        if request is not None and request.phase is Phase.ASSIGNED:
            assert request.abort_error is not None, "only an aborted request has a grace period"
            self.fail(request, request.abort_error)

    def _unfinished(self, group_id: int) -> list[Request]:
        group = self._table.groups.get(group_id)
        return [] if group is None else [self._table.requests[i] for i in group.request_ids]

    def _abort(
        self, request: Request, error: WireError, now: float, *, is_overdue: bool = False
    ) -> None:
        """Let its engine end it, so that its tokens are kept; without one it fails at once."""
        if request.phase is Phase.WAITING:
            self.fail(request, error)
        elif request.phase is Phase.ASSIGNED:
            assert request.engine is not None
            if request.abort_error is None:
                request.abort_error = error
                grace_at = now + self._context.limits.abort_grace_s
                self._context.timers.set(("grace", request.server_id), grace_at)
                self._context.abort(request.engine, request.current_attempt())
            request.is_overdue |= is_overdue

    def abandon_all(self, client: ClientSession) -> None:
        """The client has gone: end its requests, forget its replies."""
        for server_id in list(client.server_ids.values()):
            request = self._table.requests[server_id]
            engine, is_finished = request.engine, request.phase is Phase.FINISHED
            if engine is not None:
                self._context.abort(engine, request.current_attempt())
            self._table.forget(request)
            if not is_finished:
                self._context.counters.num_abandoned += 1
                self._ended(request, engine)

    def unsendable(self, session: Session | None, message: Message, error: WireError) -> None:
        """A message is too large to be sent: the requests it is about end with `error` instead."""
        requests = self._table.requests
        if isinstance(message, AssignRequest):
            for sample in message.samples:
                request = requests.get(sample.request_id)
                if request is not None and request.phase is Phase.ASSIGNED:
                    self.fail(request, error)
        elif isinstance(message, EngineReply) and isinstance(session, ClientSession):
            server_id = session.server_ids.get(message.request_id)
            if server_id is not None:
                reply = failure(message.request_id, error)
                self._table.replace_reply(requests[server_id], reply)
                self._context.send(session, reply)

    def fail_all(self, error: WireError) -> None:
        """Every unfinished request fails, and no new one is taken."""
        self.is_open = False
        for request in list(self._table.requests.values()):
            if request.phase is not Phase.FINISHED:
                self.fail(request, error)

    # ---- answers

    def fail(self, request: Request, error: WireError) -> None:
        """Answer a request without its engine, which is to end the attempt that it has."""
        if request.engine is not None:
            self._context.abort(request.engine, request.current_attempt())
        self._answer(request, failure(request.client_request_id, error))

    def _answer(self, request: Request, reply: EngineReply) -> None:
        counters, engine = self._context.counters, request.engine
        counters.num_failed += reply.is_failed
        counters.num_completed += not reply.is_failed
        self._table.finish(request, reply)
        self._ended(request, engine)
        self._context.send(request.client, reply)

    def _ended(self, request: Request, engine: EngineSession | None) -> None:
        timers, group = self._context.timers, request.group
        self._dispatcher.released(request, engine)
        if not group.request_ids:
            timers.discard(("deadline", group.group_id))
        if request.abort_error is not None:
            timers.discard(("grace", request.server_id))

    def acknowledged(self, client: ClientSession, message: ReplyAck, now: float) -> None:
        """These replies have arrived."""
        for named in message.attempts:
            server_id = client.server_ids.get(named.request_id)
            request = None if server_id is None else self._table.requests[server_id]
            if request is None or request.phase is not Phase.FINISHED:
                self._context.counters.num_unexpected += 1
                continue
            client.answered.add(named.request_id)
            client.missed_tokens.pop(named.request_id, None)
            self._table.forget(request)

    def resend(self, client: ClientSession, request_id: int, offset: int = 0) -> None:
        """The reply, or the tokens so far from `offset` on if they are streamed."""
        request = self._table.requests[client.server_ids[request_id]]
        tokens = request.log.whole() if request.group.is_streaming else None
        if request.reply is not None:
            self._context.send(client, request.reply)
        elif tokens is not None:
            tokens = tokens.from_offset(offset)
            self._context.send(client, EngineReplyPartial(request_id=request_id, tokens=tokens))


def failure(client_request_id: int, error: WireError) -> EngineReply:
    """The end of a request that left no record."""
    return EngineReply(request_id=client_request_id, error=error, is_failed=True)
