"""Dispatcher: the fleet's one queue of requests, and which engine gets which of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rollout.coordinator.core.context import Context
from rollout.coordinator.core.indexed_heap import IndexedHeap
from rollout.coordinator.core.request_table import Group, Phase, Request, RequestTable
from rollout.coordinator.core.sessions import EngineSession
from rollout.coordinator.protocol.messages import (
    AssignRequest,
    Credit,
    RunningAttempt,
    Sample,
)
from rollout.coordinator.protocol.wire import unpack
from rollout.coordinator.routing.policies import RoutingPolicy
from rollout.coordinator.routing.schedule_recorder import ScheduleRecorder
from rollout.errors import ProtocolError
from rollout.requests.block_hash import compute_block_hashes_batched

# Params that are read once for many requests: few differ. Larger ones are not kept.
_MAX_REMEMBERED_BYTES = 4096
# Every so many groups, the one that waits for longest, so that higher priorities starve nobody.
_OLDEST_EVERY = 16


class Dispatcher:
    """The only caller of the routing policy, and the only one that assigns requests.

    Groups wait by priority, then arrival, until an engine has room: it grants credit. A group goes
    to one engine as a whole if that has room for one sample. Requests that may be the reason why
    engines were lost wait apart: each engine gets one of them at a time, so that the next loss
    says which one it is.
    """

    def __init__(
        self,
        context: Context,
        table: RequestTable,
        policy: RoutingPolicy,
        *,
        block_size_tokens: int | None,
        recorder: ScheduleRecorder | None,
    ) -> None:
        """`block_size_tokens`: None routes without looking at prefixes."""
        self._context, self._table = context, table
        self._policy, self._recorder = policy, recorder
        self._block_size = block_size_tokens
        self._queue: IndexedHeap[int] = IndexedHeap()  # group ids by priority
        self._arrivals: IndexedHeap[int] = IndexedHeap()  # the same ones by arrival
        self._last_chances: dict[int, Request] = {}
        self._num_dispatched = 0
        self._ready: dict[int, EngineSession] = {}  # by rank
        self._with_room: dict[int, EngineSession] = {}

    def hash_prompt(self, prompt_tokens: npt.NDArray[np.int32]) -> list[int]:
        """The block hashes to route by; [] where prefixes do not matter."""
        if self._block_size is None or len(prompt_tokens) < self._block_size:
            return []
        return compute_block_hashes_batched(prompt_tokens, self._block_size)

    # ---- engines

    def engine_ready(self, engine: EngineSession) -> None:
        """It gets work from now on."""
        engine.is_ready = True
        self._ready[engine.rank] = engine
        self._policy.rank_joined(engine.rank)
        for request in self._table.assigned(engine):
            self._policy.assigned(engine.rank, request.group.hashes, request.num_tokens)
        self._update_room(engine)
        for group_id in self._waiting_groups():
            self._context.timers.discard(("orphan", group_id))

    def engine_left(self, engine: EngineSession, now: float) -> list[Request]:
        """It has gone; returns its requests, which wait for `enqueue`."""
        if engine.is_ready:
            engine.is_ready = False
            del self._ready[engine.rank]
            self._with_room.pop(engine.rank, None)
            self._policy.rank_left(engine.rank)
        requests = self._table.assigned(engine)
        for request in requests:
            self._table.requeue(request)
        if not self._ready:
            for group_id in self._waiting_groups():
                self._watch_orphans(group_id, now)
        return requests

    def weights_changed(self, engines: Iterable[EngineSession]) -> None:
        """What these engines have cached was written under other weights."""
        for engine in engines:
            if engine.is_ready:
                self._policy.weights_changed(engine.rank)

    def credit(self, engine: EngineSession, message: Credit, now: float) -> None:
        """The engine accepts so many requests since it registered; the latest number counts."""
        engine.num_granted = message.num_granted
        self._update_room(engine)

    def _update_room(self, engine: EngineSession) -> None:
        if engine.is_ready and engine.room > 0:
            self._with_room[engine.rank] = engine
        else:
            self._with_room.pop(engine.rank, None)

    # ---- requests

    def enqueue(self, requests: Iterable[Request], now: float) -> None:
        """Let waiting requests be dispatched."""
        for request in requests:
            group = request.group
            if self._is_last_chance(request):
                self._last_chances[request.server_id] = request
            elif group.group_id not in self._queue:
                self._queue.set(group.group_id, -group.priority, group.group_id)
                self._arrivals.set(group.group_id, group.group_id)
            if not self._ready:
                self._watch_orphans(group.group_id, now)

    def released(self, request: Request, engine: EngineSession | None) -> None:
        """A request has ended that `engine` had, or that waited."""
        if engine is None:
            self._leave_queue(request)
            return
        if engine.last_chance_id == request.server_id:
            engine.last_chance_id = None
        if engine.is_ready:
            self._policy.finished(engine.rank, request.num_tokens)
        self._update_room(engine)

    def progressed(self, request: Request, engine: EngineSession) -> None:
        """Its attempt got on: no loss is held against the request any more."""
        request.lost_attempts = frozenset()
        if engine.last_chance_id == request.server_id:
            engine.last_chance_id = None

    def reclaim(self, engine: EngineSession, running: Sequence[RunningAttempt]) -> None:
        """Leave to a registering engine the attempts that still count: the current ones of
        requests that it had last and nobody has got since."""
        for held in running:
            request = self._table.requests.get(held.request_id)
            if (
                request is not None
                and request.phase is Phase.WAITING
                and request.attempt == held.attempt
                and request.last_engine_id == engine.engine_id
            ):
                request.lost_attempts -= {held.attempt}
                self._table.reclaim(request, engine)
                self._leave_queue(request)
                if self._is_last_chance(request):
                    engine.last_chance_id = request.server_id

    def _leave_queue(self, request: Request) -> None:
        """A request waits no more."""
        group = request.group
        self._last_chances.pop(request.server_id, None)
        if not group.num_waiting:
            self._queue.discard(group.group_id)
            self._arrivals.discard(group.group_id)
            self._context.timers.discard(("orphan", group.group_id))

    # ---- who is lost without an engine, or by one

    def _waiting_groups(self) -> Iterable[int]:
        yield from self._queue.keys()
        yield from {request.group.group_id for request in self._last_chances.values()}

    def _watch_orphans(self, group_id: int, now: float) -> None:
        timers = self._context.timers
        if ("orphan", group_id) not in timers:
            timers.set(("orphan", group_id), now + self._context.limits.orphan_deadline_s)

    def suspects(self, engine: EngineSession) -> list[Request]:
        """The requests that an engine which says nothing more may have been running.

        Those that it reported tokens of, and of the others all but those that wait, as far as it
        said: an engine takes its requests by priority, then arrival. The first of those is a
        suspect, too, as it was next.
        """
        requests = self._table.assigned(engine)
        started = [r for r in requests if len(r.log) > r.num_known]
        others = [r for r in requests if len(r.log) == r.num_known]
        others.sort(key=lambda request: -request.group.priority)
        num_waiting = 0 if engine.status is None else engine.status.num_waiting
        return started + others[: max(1, len(others) - num_waiting)]

    def _is_last_chance(self, request: Request) -> bool:
        num_lost = len(request.lost_attempts)
        return 0 < num_lost == self._context.limits.max_lost_attempts - 1

    # ---- dispatching

    def dispatch(self) -> None:
        """Assign what waits, as far as engines have room."""
        if self._last_chances:
            self._dispatch_last_chances()
        while self._with_room and (group := self._next_group()) is not None:
            waiting = [
                request
                for request in self._table.waiting(group)
                if request.server_id not in self._last_chances
            ]
            if not waiting:
                continue
            num_tokens = sum(self._count_tokens(request) for request in waiting)
            rank = self._policy.choose(group.hashes, self._with_room.keys(), num_tokens)
            self._assign(waiting, group, self._with_room[rank])

    def _dispatch_last_chances(self) -> None:
        for engine in list(self._with_room.values()):
            if engine.last_chance_id is None and self._last_chances:
                request = self._last_chances.pop(next(iter(self._last_chances)))
                self._count_tokens(request)
                engine.last_chance_id = request.server_id
                self._assign([request], request.group, engine)

    def _next_group(self) -> Group | None:
        """Take the first group from the queue, now and then the one that came first."""
        is_oldest_due = self._num_dispatched % _OLDEST_EVERY == _OLDEST_EVERY - 1
        first = (self._arrivals if is_oldest_due else self._queue).first()
        if first is None:
            return None
        self._num_dispatched += 1
        self._queue.discard(first[1])
        self._arrivals.discard(first[1])
        return self._table.groups[first[1]]

    def _assign(self, requests: Sequence[Request], group: Group, engine: EngineSession) -> None:
        # Fresh ones share the computation of their prompt. What goes on does not, and its tokens
        # are many: those of a whole group may be more than one message may hold.
        fresh: list[Sample] = []
        resumed: list[list[Sample]] = []
        for request in requests:
            self._table.assign(request, engine)
            self._context.counters.num_reassigned += request.attempt > 0
            self._policy.assigned(engine.rank, group.hashes, request.num_tokens)
            if self._recorder is not None:
                self._recorder.record(request.server_id, engine.rank, len(group.hashes))
            sample = Sample(
                request_id=request.server_id,
                attempt=request.attempt,
                sampling_params=request.sampling_params,
                seed=request.seed,
                resumed=request.log.whole(),
            )
            if sample.resumed is None:
                fresh.append(sample)
            else:
                resumed.append([sample])
        self._update_room(engine)
        for together in [fresh, *resumed] if fresh else resumed:
            assignment = AssignRequest(
                samples=tuple(together),
                prompt_tokens=group.prompt_tokens,
                priority=group.priority,
            )
            self._context.send(engine, assignment)

    def _count_tokens(self, request: Request) -> int:
        packed, num_prompt_tokens = request.sampling_params, len(request.group.prompt_tokens)
        is_short = len(packed) <= _MAX_REMEMBERED_BYTES
        limit, counts_prompt = (_remembered_limit if is_short else _token_limit)(packed)
        num_new = max(0, limit - num_prompt_tokens if counts_prompt else limit)
        request.num_tokens = num_prompt_tokens + num_new
        return request.num_tokens


def _token_limit(packed_params: bytes) -> tuple[int, bool]:
    """The most tokens that the params allow, and whether those of the prompt are among them."""
    try:
        params = unpack(packed_params)
        to_generate, total = params["num_tokens_to_generate"], params["num_tokens_total"]
        return (int(total), True) if to_generate is None else (int(to_generate), False)
    except (ProtocolError, LookupError, TypeError, ValueError, OverflowError):
        # Routing counts roughly; it is for the engine to read them.
        return 0, False


_remembered_limit = lru_cache(maxsize=256)(_token_limit)
