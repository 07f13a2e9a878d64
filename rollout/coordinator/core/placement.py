"""Placement: which engine has which request, and what becomes of it when the engine goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from rollout.coordinator.core.books import Books
from rollout.coordinator.core.request_table import Group, Phase, Request
from rollout.coordinator.core.sessions import EnginePeer
from rollout.coordinator.protocol.messages import AssignRequest, RunningAttempt, Sample
from rollout.coordinator.protocol.wire import unpack
from rollout.coordinator.routing.policies import RoutingPolicy
from rollout.coordinator.routing.schedule_recorder import ScheduleRecorder
from rollout.errors import ProtocolError
from rollout.requests.block_hash import compute_block_hashes_batched

# Params that are read once for many requests: few differ. Larger ones are not kept.
_MAX_REMEMBERED_BYTES = 4096


class Placement:
    """The only caller of the routing policy, and the only writer of who has an attempt."""

    def __init__(
        self,
        books: Books,
        policy: RoutingPolicy,
        *,
        block_size_tokens: int | None,
        recorder: ScheduleRecorder | None,
    ) -> None:
        """`block_size_tokens`: None routes without looking at prefixes."""
        self._books, self._policy, self._recorder = books, policy, recorder
        self._block_size = block_size_tokens
        self._ready: dict[int, EnginePeer] = {}  # by rank

    # ---- engines

    def engine_ready(self, engine: EnginePeer, now: float) -> None:
        """It gets work from now on, beginning with what waits."""
        engine.is_ready = True
        self._ready[engine.rank] = engine
        self._policy.rank_joined(engine.rank)
        for server_id in engine.server_ids:
            request = self._books.requests.requests[server_id]
            self._policy.assigned(engine.rank, request.group.hashes, request.num_tokens)
        for group_id in list(self._books.requests.waiting_groups):
            self.place(self._books.requests.groups[group_id], now)

    def engine_left(self, engine: EnginePeer) -> list[Request]:
        """It is gone; returns its requests, which wait for another one. `place_all` them."""
        if engine.is_ready:
            engine.is_ready = False
            del self._ready[engine.rank]
            self._policy.rank_left(engine.rank)
        orphans = [self._books.requests.requests[server_id] for server_id in engine.server_ids]
        engine.server_ids.clear()
        for request in orphans:
            request.phase, request.engine = Phase.WAITING, None
        return orphans

    def weights_changed(self, engines: Iterable[EnginePeer]) -> None:
        """What these engines have cached was written under other weights."""
        for engine in engines:
            if engine.is_ready:
                self._policy.weights_changed(engine.rank)

    # ---- requests

    def hash_prompt(self, prompt_tokens: npt.NDArray[np.int32]) -> list[int]:
        """The block hashes to route by; [] where prefixes do not matter."""
        if self._block_size is None or len(prompt_tokens) < self._block_size:
            return []
        return compute_block_hashes_batched(
            torch.from_numpy(prompt_tokens.astype(np.int64)), self._block_size
        )

    def place_all(self, requests: Sequence[Request], now: float) -> None:
        """Place what waits of the groups of these requests."""
        groups = {request.group.group_id: request.group for request in requests}
        for group in groups.values():
            self.place(group, now)

    def place(self, group: Group, now: float) -> None:
        """Assign what waits of a group to one engine, where it has others of the group if it can.

        Without an engine it waits, up to the orphans' deadline.
        """
        books = self._books
        waiting: list[Request] = []
        engine: EnginePeer | None = None
        for server_id in group.request_ids:
            request = books.requests.requests[server_id]
            if request.phase is Phase.WAITING:
                waiting.append(request)
            elif engine is None and request.engine is not None and request.engine.is_ready:
                engine = request.engine
        if waiting and not self._ready:
            books.requests.waiting_groups[group.group_id] = None
            if ("orphan", group.group_id) not in books.timers:
                deadline_at = now + books.limits.orphan_deadline_s
                books.timers.set(("orphan", group.group_id), deadline_at)
            return
        if group.group_id in books.requests.waiting_groups:
            del books.requests.waiting_groups[group.group_id]
            books.timers.cancel(("orphan", group.group_id))
        if not waiting:
            return
        if engine is None:
            engine = self._ready[self._policy.choose(group.hashes)]
        self._assign(waiting, group, engine)

    def _assign(self, requests: Sequence[Request], group: Group, engine: EnginePeer) -> None:
        # Fresh ones share the computation of their prompt. What goes on does not, and its tokens
        # are many: those of a whole group may be more than one message may hold.
        fresh: list[Sample] = []
        resumed: list[list[Sample]] = []
        num_prompt_tokens = len(group.prompt_tokens)
        for request in requests:
            request.phase, request.engine = Phase.ASSIGNED, engine
            request.last_engine_id = engine.engine_id
            request.attempt += 1
            self._books.counters.num_reassigned += request.attempt > 0
            packed = request.sampling_params
            num_new_tokens = _num_new_tokens(packed, num_prompt_tokens)
            request.num_tokens = num_prompt_tokens + num_new_tokens
            engine.server_ids[request.server_id] = None
            self._policy.assigned(engine.rank, group.hashes, request.num_tokens)
            if self._recorder is not None:
                # Counted from 0, so that the schedules of two lives can be compared.
                number = request.server_id - self._books.requests.first_id
                self._recorder.record(number, engine.rank, len(group.hashes))
            sample = Sample(
                request_id=request.server_id,
                attempt=request.attempt,
                sampling_params=packed,
                seed=request.seed,
                resumed=request.log.whole(),
            )
            if sample.resumed is None:
                fresh.append(sample)
            else:
                resumed.append([sample])
        for together in [fresh, *resumed] if fresh else resumed:
            assignment = AssignRequest(
                samples=tuple(together),
                prompt_tokens=group.prompt_tokens,
                prompt=group.prompt,
                priority=group.priority,
            )
            self._books.send(engine, assignment)

    def release(self, request: Request) -> None:
        """Its engine is done with it, or is to be."""
        engine = request.engine
        if engine is not None:
            del engine.server_ids[request.server_id]
            if engine.is_ready:
                self._policy.finished(engine.rank, request.num_tokens)
        request.engine = None

    def adopt(self, engine: EnginePeer, running: Sequence[RunningAttempt]) -> list[Request]:
        """Leave to a registering engine the attempts that still count; returns their requests.

        They are the current ones of requests that it had last and nobody has got since.
        """
        adopted: list[Request] = []
        for held in running:
            request = self._books.requests.requests.get(held.request_id)
            if (
                request is not None
                and request.phase is Phase.WAITING
                and request.attempt == held.attempt
                and request.last_engine_id == engine.engine_id
            ):
                request.phase, request.engine = Phase.ASSIGNED, engine
                request.lost_attempts -= {held.attempt}
                engine.server_ids[request.server_id] = None
                adopted.append(request)
        return adopted


def _num_new_tokens(packed_params: bytes, num_prompt_tokens: int) -> int:
    """How many tokens the params allow after the prompt; 0 where they do not say."""
    is_short = len(packed_params) <= _MAX_REMEMBERED_BYTES
    limit, counts_prompt = (_remembered_limit if is_short else _token_limit)(packed_params)
    return max(0, limit - num_prompt_tokens if counts_prompt else limit)


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
