"""Dispatcher: the fleet's queue of requests, and their assignment to engines.

Used by `core`, `fleet` and `request_lifecycle` of `rollout.coordinator.core`. It changes the queue,
the RequestTable, the routing policy's state and the timers of requests without an engine.
AssignRequests go to the outbox of the Context.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rollout.coordinator.core.context import Context
from rollout.coordinator.core.request_table import EngineSession, Group, Request, RequestTable
from rollout.coordinator.protocol.messages import AssignRequest, Attempt, Credit, Sample
from rollout.coordinator.routing.policies import RoutingPolicy
from rollout.coordinator.routing.schedule_recorder import ScheduleRecorder
from rollout.errors import ProtocolError, RolloutError, WeightUpdateError
from rollout.requests.block_hash import compute_block_hashes_batched
from rollout.wire import unpack

logger = logging.getLogger(__name__)

# Sampling params up to this size are cached: most requests share theirs.
_MAX_REMEMBERED_BYTES = 4096
# Every sixteenth group is the one that has waited longest: no group starves.
_OLDEST_EVERY = 16


class GroupQueue:
    """A queue of groups by priority, then by arrival. Every sixteenth group taken is the oldest
    one. `groups` holds the queued groups by id. Ids rise with arrival. Each call takes amortized
    logarithmic time in the number of groups."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        # These heaps may have entries of removed groups, and two of a group that was added again.
        self._by_priority: list[tuple[int, int]] = []
        self._by_arrival: list[tuple[int, int]] = []
        self._num_taken = 0

    def add(self, group: Group) -> None:
        group_id = group.group_id
        if group_id in self.groups:
            return
        self.groups[group_id] = group
        heapq.heappush(self._by_priority, (-group.priority, group_id))
        heapq.heappush(self._by_arrival, (0, group_id))
        # At a multiple of the groups, so that rebuilding costs amortized constant time.
        if len(self._by_priority) + len(self._by_arrival) > 128 + 4 * len(self.groups):
            self._by_priority = [(-group.priority, i) for i, group in self.groups.items()]
            self._by_arrival = [(0, group_id) for group_id in self.groups]
            heapq.heapify(self._by_priority)
            heapq.heapify(self._by_arrival)

    def discard(self, group_id: int) -> None:
        self.groups.pop(group_id, None)

    def take(self) -> Group:
        """Remove and return the next group. The queue must not be empty."""
        self._num_taken += 1
        is_oldest_due = self._num_taken % _OLDEST_EVERY == 0
        heap = self._by_arrival if is_oldest_due else self._by_priority
        while (group := self.groups.pop(heapq.heappop(heap)[1], None)) is None:
            pass
        return group


class Dispatcher:
    """Assigns waiting requests to the engines that the routing policy chooses.

    Only this class calls the policy. Groups wait in a GroupQueue until an engine has room. An
    engine grants room as credit. All samples of a group go to one engine, even if it has room for
    only one.

    A request is on its last chance if one more failed engine makes it fail. Such requests wait in a
    queue of their own. Each engine gets one of them at a time, so that an engine's
    failure shows which request causes it."""

    def __init__(
        self,
        context: Context,
        table: RequestTable,
        policy: RoutingPolicy,
        *,
        block_size_tokens: int | None,
        recorder: ScheduleRecorder | None,
    ) -> None:
        """`block_size_tokens` is the size of the blocks by which prompts are routed, or None to
        ignore prefixes."""
        self._context, self._table = context, table
        self._policy, self._recorder = policy, recorder
        self.block_size_tokens = block_size_tokens
        self._queue = GroupQueue()
        self._last_chances: dict[int, Request] = {}
        self._ready: dict[int, EngineSession] = {}  # by rank
        self._with_room: dict[int, EngineSession] = {}  # by rank
        self._is_fault_logged = False  # whether a wrong choice of the policy was logged
        self.awaits_push = False  # whether only a weight push can make an engine ready

    def hash_prompt(self, prompt_tokens: npt.NDArray[np.int32]) -> list[int]:
        """Return the hashes of the prompt's whole blocks, or [] if prefixes are ignored."""
        if self.block_size_tokens is None or len(prompt_tokens) < self.block_size_tokens:
            return []
        return compute_block_hashes_batched(prompt_tokens, self.block_size_tokens)

    # ---- engines

    def begin_work(self, engine: EngineSession, now: float) -> None:
        """Assign requests to this engine from now on."""
        engine.begin_work(now)
        self._ready[engine.rank] = engine
        self._policy.rank_joined(engine.rank)
        for request in engine.requests.values():
            self._policy.assigned(engine.rank, request.group.hashes, request.num_tokens)
        self._update_room(engine)
        for group_id in self.waiting_groups():
            self._context.timers.discard(("orphan", group_id))

    def end_work(self, engine: EngineSession, now: float) -> list[Request]:
        """Stop assigning requests to an engine that has left. Returns the engine's requests, which
        now have no engine. The caller passes them to `RequestLifecycle.requeue`."""
        if engine.is_ready:
            engine.end_work()
            del self._ready[engine.rank]
            self._with_room.pop(engine.rank, None)
            self._policy.rank_left(engine.rank)
        requests = list(engine.requests.values())
        for request in requests:
            self._table.requeue(request)
        if not self._ready:
            self._watch_orphans(self.waiting_groups(), now)
        return requests

    def caches_dropped(self, engines: Iterable[EngineSession]) -> None:
        """Report to the routing policy that these engines cannot reuse their cached blocks."""
        for engine in engines:
            if engine.is_ready:
                self._policy.cache_dropped(engine.rank)

    def credit(self, engine: EngineSession, message: Credit, now: float) -> None:
        """Record how many requests the engine accepts, counted since it registered."""
        if engine.grant(message):
            self._update_room(engine)
        else:
            self._context.counters.num_stale += 1

    def _update_room(self, engine: EngineSession) -> None:
        if engine.has_room:
            self._with_room[engine.rank] = engine
        else:
            self._with_room.pop(engine.rank, None)

    # ---- requests

    def enqueue(self, requests: Iterable[Request], now: float) -> None:
        for request in requests:
            if request.lost_attempts and self._is_last_chance(request):
                self._last_chances[request.server_id] = request
            else:
                self._queue.add(request.group)
            if not self._ready:
                self._watch_orphans([request.group.group_id], now)

    def released(self, request: Request, engine: EngineSession | None) -> None:
        """Remove an ended request from the load of `engine`, or from the queue if `engine` is
        None."""
        if engine is None:
            self._leave_queue(request)
            return
        engine.end_last_chance(request)
        if engine.is_ready:
            self._policy.finished(engine.rank, request.num_tokens)
            self._update_room(engine)

    def progressed(self, request: Request, engine: EngineSession) -> None:
        """Clear the engine failures recorded for a request."""
        # New tokens show that the request did not cause the failures.
        request.lost_attempts = frozenset()
        engine.end_last_chance(request)

    def reclaim(self, engine: EngineSession, running: Sequence[Attempt]) -> None:
        """Give a registering engine back the attempts in `running`. Attempts whose requests have
        ended or were assigned again are skipped."""
        for held in running:
            request = self._table.requests.get(held.request_id)
            if (
                request is not None
                and request.is_waiting
                and request.attempt == held.attempt
                and request.last_engine_id == engine.engine_id
            ):
                request.lost_attempts -= {held.attempt}
                self._table.reclaim(request, engine)
                self._leave_queue(request)
                if self._is_last_chance(request):
                    engine.begin_last_chance(request)

    def _leave_queue(self, request: Request) -> None:
        """Remove a request from the queue, and its group if no request of the group waits."""
        group = request.group
        self._last_chances.pop(request.server_id, None)
        if not group.waiting:
            self._queue.discard(group.group_id)
            self._context.timers.discard(("orphan", group.group_id))

    # ---- requests without an engine, and requests that may make engines fail

    def waiting_groups(self) -> list[int]:
        """Return the ids of groups with waiting requests. Groups of requests on their last chance
        come last."""
        apart = dict.fromkeys(r.group.group_id for r in self._last_chances.values())
        return [*self._queue.groups, *apart]

    @property
    def num_waiting(self) -> int:
        """Number of requests without an engine."""
        groups = {r.group.group_id: r.group for r in self._last_chances.values()}
        return sum(len(group.waiting) for group in (self._queue.groups | groups).values())

    def await_push(self, is_awaited: bool, now: float) -> None:
        """Record whether only a weight push can make an engine ready. If `is_awaited`, waiting
        requests fail after `push_wait_s` instead of `orphan_deadline_s`."""
        if is_awaited is self.awaits_push:
            return
        # Requests fail sooner: the trainer that pushes may be waiting for their replies.
        self.awaits_push = is_awaited
        if is_awaited:
            logger.warning(
                "no engine has the weights of the last push, and its transport keeps no copy; "
                "requests fail in %g s unless another push comes",
                self._orphan_wait_s,
            )
        for group_id in [] if self._ready else self.waiting_groups():
            self._context.timers.discard(("orphan", group_id))
            self._watch_orphans([group_id], now)

    def orphan_error(self) -> RolloutError:
        """Return the error of requests that waited too long for an engine."""
        if not self.awaits_push:
            return RolloutError(f"no engine was ready for {self._orphan_wait_s:g} s")
        error = WeightUpdateError(
            "no engine has the weights of the last push: all that had them have ended, its "
            "transport keeps no copy for those that were started since, and no other push came for "
            f"{self._orphan_wait_s:g} s (push_wait_s). Push the weights and submit again; with "
            "weight_transport='shared' or 'directory:PATH' engines fetch them themselves"
        )
        error.is_transient = True
        return error

    @property
    def _orphan_wait_s(self) -> float:
        limits = self._context.limits
        longest_s = limits.orphan_deadline_s
        return min(longest_s, limits.push_wait_s) if self.awaits_push else longest_s

    def _watch_orphans(self, group_ids: Iterable[int], now: float) -> None:
        timers, due_at = self._context.timers, now + self._orphan_wait_s
        for group_id in group_ids:
            if ("orphan", group_id) not in timers:
                timers.set(("orphan", group_id), due_at)

    def suspects(self, engine: EngineSession) -> list[Request]:
        """Return the requests that a silent engine may have been running.

        Requests that have reported tokens since they were assigned are returned. So are requests
        that the engine may have begun. The engine begins requests by priority, then by arrival. Its
        latest `num_waiting` says how many have not begun. At least one request without new tokens
        is returned if there is any."""
        requests = engine.requests.values()
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
        """Assign waiting requests while engines have room."""
        if self._last_chances:
            self._dispatch_last_chances()
        while self._with_room and self._queue.groups:
            group = self._queue.take()
            waiting = list(group.waiting.values())
            if self._last_chances:
                waiting = [r for r in waiting if r.server_id not in self._last_chances]
            if waiting:
                self._assign(waiting, group, self._choose(group, waiting))

    def _dispatch_last_chances(self) -> None:
        for engine in list(self._with_room.values()):
            if engine.last_chance_id is None and self._last_chances:
                request = self._last_chances.pop(next(iter(self._last_chances)))
                engine.begin_last_chance(request)
                self._assign([request], request.group, engine)

    def _choose(self, group: Group, requests: Sequence[Request]) -> EngineSession:
        """Return the engine that the policy chooses. If the policy chooses no rank with room,
        return the engine with room and the fewest requests."""
        num_tokens = sum([request.num_tokens for request in requests])
        rank = self._policy.choose(group.hashes, self._with_room.keys(), num_tokens)
        if isinstance(rank, (int, np.integer)) and rank in self._with_room:
            return self._with_room[int(rank)]
        if not self._is_fault_logged:
            self._is_fault_logged = True
            logger.error(
                "routing policy %s chose rank %r, but the ranks with room are %s; the one with the "
                "fewest requests is taken instead (logged once)",
                *(type(self._policy).__name__, rank, sorted(self._with_room)),
            )
        return min(self._with_room.values(), key=lambda e: (len(e.requests), e.rank))

    def _assign(self, requests: Sequence[Request], group: Group, engine: EngineSession) -> None:
        # New samples share the computation of their prompt, so one message has them all. Resumed
        # ones do not share it, and a message may be too small for all their tokens.
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


def count_tokens(num_prompt_tokens: int, packed_params: bytes) -> int:
    """Return the most prompt and output tokens that a request with these params can have. Malformed
    params count as no output."""
    is_short = len(packed_params) <= _MAX_REMEMBERED_BYTES
    limit, counts_prompt = (_remembered_limit if is_short else _token_limit)(packed_params)
    return max(num_prompt_tokens, limit if counts_prompt else num_prompt_tokens + limit)


def _token_limit(packed_params: bytes) -> tuple[int, bool]:
    """Return the most tokens that the params allow, and whether that number includes the prompt.
    Returns (0, False) for malformed params."""
    try:
        params = unpack(packed_params)
        to_generate, total = params["num_tokens_to_generate"], params["num_tokens_total"]
        return (int(total), True) if to_generate is None else (int(to_generate), False)
    except (ProtocolError, LookupError, TypeError, ValueError, OverflowError):
        # Routing only needs an estimate; the engine refuses malformed params.
        return 0, False


_remembered_limit = lru_cache(maxsize=256)(_token_limit)
