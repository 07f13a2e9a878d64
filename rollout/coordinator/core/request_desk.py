"""RequestDesk: how requests end, and what their clients get."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.coordinator.core.books import Books
from rollout.coordinator.core.placement import Placement
from rollout.coordinator.core.request_table import Phase, Request
from rollout.coordinator.core.sessions import ClientPeer, Peer
from rollout.coordinator.core.text_jobs import Detokenized
from rollout.coordinator.core.token_log import TokenLog
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    AssignRequest,
    Attempt,
    EngineReply,
    EngineReplyPartial,
    Message,
    ReplyAck,
    WireError,
)
from rollout.errors import RequestAbortedError, RolloutError


class RequestDesk:
    """The only writer of requests' ends. A reply is kept until its client acknowledges it."""

    def __init__(self, books: Books, placement: Placement) -> None:
        self._books, self._placement = books, placement
        self.is_open = True  # until the end, requests are taken

    # ---- giving up

    def abort(self, client: ClientPeer, message: AbortRequest, now: float) -> None:
        """End these requests of a client; each is answered by its reply."""
        error = WireError.of(RequestAbortedError("aborted by its client"))
        for named in message.attempts:
            server_id = client.server_ids.get(named.request_id)
            if server_id is None:
                self._books.counters.num_unexpected += 1
            else:
                self._abort(self._books.requests.requests[server_id], error, now)

    def deadline_passed(self, group_id: int, now: float) -> None:
        """Abort what is unfinished of a group."""
        group = self._books.requests.groups.get(group_id)
        if group is None:
            return
        error = WireError.of(RequestAbortedError("the request's deadline has passed"))
        for server_id in list(group.request_ids):
            self._abort(self._books.requests.requests[server_id], error, now, is_overdue=True)

    def orphaned(self, group_id: int) -> None:
        """No engine came for what waits of a group."""
        group = self._books.requests.groups.get(group_id)
        if group is None:
            return
        wait_s = self._books.limits.orphan_deadline_s
        error = RolloutError(f"no engine was there for {wait_s:g} s")
        for request in self._books.requests.members(group, Phase.WAITING):
            self.fail(request, WireError.of(error))
        self._books.requests.waiting_groups.pop(group_id, None)

    def engine_lost(self, requests: Sequence[Request]) -> None:
        """The engine of these attempts is lost, perhaps by one of them: a request does not go from
        engine to engine for ever."""
        for request in requests:
            request.lost_attempts |= {request.attempt}
            num_lost = len(request.lost_attempts)
            if num_lost >= self._books.limits.max_lost_attempts and request.abort_error is None:
                error = RolloutError(
                    f"{num_lost} engines were lost while they ran this request; it is not given "
                    "to another one"
                )
                self.fail(request, WireError.of(error))

    def grace_passed(self, server_id: int) -> None:
        """An engine has not answered an abort in time: the client need not wait for it."""
        request = self._books.requests.requests.get(server_id)
        if request is not None and request.phase is Phase.ASSIGNED:
            assert request.abort_error is not None, "only an aborted request has a grace period"
            self.fail(request, request.abort_error)

    def _abort(
        self, request: Request, error: WireError, now: float, *, is_overdue: bool = False
    ) -> None:
        """Let its engine end it, so that its tokens are kept; without one it fails at once."""
        if request.phase in (Phase.FINISHED, Phase.DETOKENIZING):
            return
        if request.engine is None:
            self.fail(request, error)
            return
        if request.abort_error is None:
            request.abort_error = error
            grace_s = self._books.limits.abort_grace_s
            self._books.timers.set(("grace", request.server_id), now + grace_s)
            self._tell_engine_to_abort(request)
        request.is_overdue |= is_overdue

    def _tell_engine_to_abort(self, request: Request) -> None:
        assert request.engine is not None
        attempt = Attempt(request_id=request.server_id, attempt=request.attempt)
        self._books.send(request.engine, AbortRequest(attempts=(attempt,)))

    def abandon_all(self, client: ClientPeer) -> None:
        """The client has gone: end its requests, forget its replies."""
        table = self._books.requests
        for server_id in list(client.server_ids.values()):
            request = table.requests[server_id]
            if request.phase is not Phase.FINISHED:
                self._books.counters.num_abandoned += 1
                self._end(request, tell_engine=True)
            table.forget(request)

    def unsendable(self, peer: Peer | None, message: Message, error: WireError) -> None:
        """A message is too large to be sent: the requests it is about end with `error` instead."""
        table = self._books.requests.requests
        if isinstance(message, AssignRequest):
            for sample in message.samples:
                request = table.get(sample.request_id)
                if request is not None and request.phase is Phase.ASSIGNED:
                    self.fail(request, error)
        elif isinstance(message, EngineReply) and isinstance(peer, ClientPeer):
            server_id = peer.server_ids.get(message.request_id)
            if server_id is not None:
                self._replace_reply(table[server_id], failure(message.request_id, error))

    def _replace_reply(self, request: Request, reply: EngineReply) -> None:
        request.client.kept_bytes -= request.kept_bytes
        request.kept_bytes, request.reply = 0, reply
        self._books.send(request.client, reply)

    def fail_all(self, error: WireError) -> None:
        """Every unfinished request fails, and no new one is taken."""
        self.is_open = False
        for request in list(self._books.requests.requests.values()):
            if request.phase is Phase.DETOKENIZING:
                self.detokenized(Detokenized(request.server_id, None))
            elif request.phase is not Phase.FINISHED:
                self.fail(request, error)

    # ---- answering

    def fail(self, request: Request, error: WireError) -> None:
        """Answer a request without its engine, which is to end the attempt that it has."""
        self._end(request, tell_engine=True)
        self._answer(request, failure(request.client_request_id, error))

    def finish(
        self, request: Request, reply: EngineReply, result: Detokenized | None = None
    ) -> None:
        """Answer a request with its engine's reply, under the client's name for it."""
        self._end(request, tell_engine=False)
        error = reply.error if result is None else reply.error or result.error
        if request.is_overdue and reply.is_failed:
            error = request.abort_error
        own = EngineReply(
            request_id=request.client_request_id,
            record=reply.record,
            error=error,
            is_failed=reply.is_failed,
            generated_text=None if result is None else result.text,
        )
        self._answer(request, own)

    def detokenized(self, result: Detokenized) -> None:
        """The text of a reply is there, if anybody still wants it."""
        request = self._books.requests.requests.get(result.server_id)
        if request is not None and request.phase is Phase.DETOKENIZING:
            assert request.reply is not None
            self.finish(request, request.reply, result)

    def _end(self, request: Request, *, tell_engine: bool) -> None:
        """Take the request from its engine, its group and all timers of its own."""
        if tell_engine and request.engine is not None:
            self._tell_engine_to_abort(request)
        self._placement.release(request)
        self._books.requests.leave_group(request)
        # Its text need not be done any more. Members of a group may still wait for their prompt.
        if request.phase is Phase.DETOKENIZING:
            self._books.text_jobs.drop(request.server_id)
        if not request.group.request_ids:
            self._books.text_jobs.drop(request.group.group_id)
            self._books.timers.cancel(("deadline", request.group.group_id))
            self._books.timers.cancel(("orphan", request.group.group_id))
        if request.abort_error is not None:
            self._books.timers.cancel(("grace", request.server_id))

    def _answer(self, request: Request, reply: EngineReply) -> None:
        counters = self._books.counters
        counters.num_failed += reply.is_failed
        counters.num_completed += not reply.is_failed
        request.phase, request.reply = Phase.FINISHED, reply
        request.sampling_params = b""
        if len(request.log):
            request.log = TokenLog()
        request.kept_bytes = len(reply.record or b"") + len(reply.generated_text or "")
        request.client.kept_bytes += request.kept_bytes
        self._books.send(request.client, reply)

    def acknowledged(self, client: ClientPeer, message: ReplyAck) -> None:
        """These replies have arrived."""
        for named in message.attempts:
            server_id = client.server_ids.get(named.request_id)
            request = None if server_id is None else self._books.requests.requests[server_id]
            if request is None or request.phase is not Phase.FINISHED:
                self._books.counters.num_unexpected += 1
                continue
            client.answered.add(named.request_id)
            self._books.requests.forget(request)

    def tell_all_again(self, client: ClientPeer) -> None:
        """What a client that was away may have missed."""
        for server_id in client.server_ids.values():
            self.tell_again(self._books.requests.requests[server_id])

    def tell_again(self, request: Request) -> None:
        """The reply, or all tokens so far if they are streamed."""
        if request.phase is Phase.FINISHED:
            assert request.reply is not None
            self._books.send(request.client, request.reply)
        elif request.group.is_streaming and (tokens := request.log.whole()) is not None:
            self._books.send(
                request.client,
                EngineReplyPartial(request_id=request.client_request_id, tokens=tokens),
            )


def failure(client_request_id: int, error: WireError) -> EngineReply:
    """The end of a request that left no record."""
    return EngineReply(request_id=client_request_id, error=error, is_failed=True)
