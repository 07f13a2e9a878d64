"""RequestQueue holds the waiting requests, and RunningRequests the requests that have rows.

Only `rollout.scheduling.scheduler` creates and calls them. They change sequences, KV blocks, the
routing record and the memory forecast.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator

from rollout.blocks.kv_cache_manager import KVCacheManager
from rollout.blocks.routing_record import RoutingRecord
from rollout.scheduling.forecast import MemoryForecast
from rollout.scheduling.planned_step import PlannedStep
from rollout.scheduling.sequence import Phase, Sequence, order_of

_Order = tuple[int, int]


class RequestQueue:
    """The waiting requests, sorted by `Sequence.order`. A preempted request returns to its old
    place. Adding, removing and reading the head take O(log n). Iteration has no particular order.
    """

    def __init__(self) -> None:
        self._waiting: dict[_Order, Sequence] = {}
        self._groups: dict[int, dict[_Order, Sequence]] = {}
        # Two heaps. Entries of sequences that have left are skipped, and cleared if there are many.
        self._by_order: list[_Order] = []
        self._by_arrival: list[tuple[int, _Order]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    @property
    def head(self) -> Sequence:
        """The first sequence in order. The queue must not be empty."""
        while self._by_order[0] not in self._waiting:
            heapq.heappop(self._by_order)
        return self._waiting[self._by_order[0]]

    def promote_longest_waiting(self) -> None:
        """Move the request that arrived first to the head, with the priority of the former head."""
        while self._by_arrival[0][1] not in self._waiting:
            heapq.heappop(self._by_arrival)
        sequence, head = self._waiting[self._by_arrival[0][1]], self.head
        if sequence is not head:
            self.remove(sequence)
            sequence.order = (head.order[0], sequence.order[1])
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        order = sequence.order
        self._waiting[order] = sequence
        if sequence.group_id is not None:
            self._groups.setdefault(sequence.group_id, {})[order] = sequence
        heapq.heappush(self._by_order, order)
        heapq.heappush(self._by_arrival, (order[1], order))

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence.order]
        if sequence.group_id is not None:
            group = self._groups[sequence.group_id]
            del group[sequence.order]
            if not group:
                del self._groups[sequence.group_id]
        if len(self._by_order) + len(self._by_arrival) > 4 * len(self._waiting) + 64:
            self._by_order = sorted(self._waiting)
            self._by_arrival = sorted((order[1], order) for order in self._waiting)

    def siblings(self, leader: Sequence) -> list[Sequence]:
        """Return the waiting members of the leader's group, in order."""
        if leader.group_id is None:
            return []
        group = self._groups.get(leader.group_id, {})
        return [group[order] for order in sorted(group)]


class RunningRequests:
    """The requests that have rows, sorted by `Sequence.order`.

    It allocates blocks for the next tokens of all requests, oldest request first. When blocks run
    out, the newest request is preempted: its row and blocks are freed, and the scheduler queues it
    again.

    If `max_paused_blocks` is above 0, a request that finds no block is paused instead and keeps its
    blocks. The newest paused requests are preempted while all paused requests together hold more
    than `max_paused_blocks` blocks. A request is also paused if every newer request has a step in
    flight, which forbids preemption. `paused` has the paused requests in order.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        forecast: MemoryForecast,
        *,
        max_paused_blocks: int,
        routing: RoutingRecord | None = None,
    ) -> None:
        self._routing = routing
        self.paused: list[Sequence] = []
        self._sequences: list[Sequence] = []
        self._kv, self._forecast = kv_cache_manager, forecast
        self._max_paused_blocks = max_paused_blocks

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    # ---- entering and leaving

    def add(self, sequence: Sequence) -> None:
        """Give a sequence a row. The caller has checked that a row is free."""
        sequence.phase = Phase.RUNNING
        self._kv.allocate_row(sequence.table)
        sequence.is_new_row = True
        bisect.insort(self._sequences, sequence, key=order_of)
        self._forecast.add(sequence)

    def finish(self, sequence: Sequence, *, has_stopped: bool) -> None:
        """Remove a sequence that has ended. `has_stopped` is whether its finish reason is "stop".
        Its row and blocks are freed at once, or as soon as no plan in flight uses them."""
        self._remove(sequence, has_stopped=has_stopped)
        sequence.phase = Phase.FINISHED
        if not sequence.num_in_flight:
            self._free(sequence)

    def leave_flight(self, step: PlannedStep) -> None:
        """Record that a step is no longer in flight, and free ended sequences that only this step
        used."""
        for sequence in step.sequences():
            sequence.num_in_flight -= 1
            if sequence.phase is Phase.FINISHED and not sequence.num_in_flight:
                self._free(sequence)

    def release(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Free the rows and blocks of sequences. Returns the sequences in order, for the caller to
        queue."""
        ordered = sorted(sequences, key=order_of)
        for sequence in ordered:
            assert not sequence.num_in_flight, "a plan in flight writes to its blocks"
            self._remove(sequence)
            self._free(sequence)
            sequence.restart()
        return ordered

    def _remove(self, sequence: Sequence, *, has_stopped: bool = False) -> None:
        index = bisect.bisect_left(self._sequences, sequence.order, key=order_of)
        assert self._sequences[index] is sequence
        del self._sequences[index]
        if self._routing is not None:  # before the blocks are freed
            blocks, num_positions = sequence.table.blocks, len(sequence.kv_spans)
            self._routing.keep(sequence.request_id, blocks, num_positions)
        if sequence.phase is Phase.PAUSED:
            self.paused.remove(sequence)
        self._forecast.remove(sequence, has_stopped=has_stopped)

    def _free(self, sequence: Sequence) -> None:
        self._kv.free(sequence.table)
        self._kv.free_row(sequence.table)

    # ---- blocks for the next step

    def allocate(self, step: PlannedStep) -> list[Sequence]:
        """Give each sequence the blocks for its next tokens. Returns the sequences that can run.
        Records in `step` which sequences are paused, resumed and preempted."""
        self._forecast.start_step()
        runnable: list[Sequence] = []
        for sequence in self._sequences.copy():
            if sequence.num_tokens > sequence.writable_end:
                if sequence.phase is Phase.WAITING or sequence.num_tokens >= sequence.max_length:
                    continue  # it was preempted just now, or its last token is in flight
                if not self._allocate_or_preempt(sequence, step):
                    continue
            elif sequence.num_tokens >= sequence.max_length:
                continue
            runnable.append(sequence)
        if self.paused:
            self._pause_newest(step, runnable)
            self._resume(step, runnable)
            self._preempt_excess(step)
        return runnable

    def allocate_alone(self, sequence: Sequence, step: PlannedStep) -> None:
        """Give one sequence the blocks for its next tokens, regardless of its order. If it waits, a
        row is free for it afterwards. Other sequences are preempted, newest first, until it has its
        blocks."""
        has_row = sequence.phase is not Phase.WAITING or self._kv.num_free_rows > 0
        has_blocks = has_row and self._allocate(sequence, step)
        for newest in [] if has_blocks else reversed(self._sequences.copy()):
            if newest is not sequence:
                self._preempt(newest, step)
                if self._allocate(sequence, step):
                    break
        self._resume(step, [sequence])

    def _allocate_or_preempt(self, sequence: Sequence, step: PlannedStep) -> bool:
        """Give the sequence its blocks, and preempt newer sequences if needed; otherwise pause it.
        Returns False if it cannot run in this step."""
        while not self._allocate(sequence, step):
            if not self._preempt_for(sequence, step):
                self._pause(sequence, step)
                return False
            if sequence.phase is Phase.WAITING:
                return False  # it was the newest and has been preempted
        return True

    def _allocate(self, sequence: Sequence, step: PlannedStep) -> bool:
        """Give the sequence blocks for all its tokens. Returns False if too few blocks are free.
        Copies of shared blocks that it will write are added to `step`."""
        start, end = sequence.num_computed, sequence.num_tokens
        copies = self._kv.allocate(sequence.table, start, end)
        if copies is None:
            return False
        if copies:
            first = start // self._kv.block_size
            sequence.num_blocks_sent = min(sequence.num_blocks_sent, first)
            size, blocks = self._kv.block_size, sequence.table.blocks
            places = [blocks.index(target, first) for _, target in copies]
            step.add_copies(copies, [max(0, start - index * size) for index in places], sequence)
        sequence.writable_end = len(sequence.table.blocks) * self._kv.block_size
        self._forecast.observe_length(sequence)
        return True

    # ---- when blocks run out

    def _preempt(self, sequence: Sequence, step: PlannedStep) -> None:
        self.release([sequence])
        step.preempted.append(sequence)

    def _preempt_for(self, sequence: Sequence, step: PlannedStep) -> bool:
        """Preempt the newest sequence that no plan in flight uses, to free blocks for `sequence`.

        Returns False if there is no such sequence that is as new as `sequence` or newer. The oldest
        sequence is never preempted, so that it progresses. If sequences can pause, preemption is
        only for the oldest sequence.
        """
        oldest = self._sequences[0]
        if self._max_paused_blocks and sequence is not oldest:
            return False
        for newest in reversed(self._sequences):
            if newest is oldest or newest.order < sequence.order:
                return False
            if not newest.num_in_flight:
                self._forecast.observe_preemption(len(newest.table.blocks))
                self._preempt(newest, step)
                return True
        return False

    def _pause(self, sequence: Sequence, step: PlannedStep) -> None:
        if sequence.phase is not Phase.PAUSED:
            sequence.phase = Phase.PAUSED
            bisect.insort(self.paused, sequence, key=order_of)
            step.paused.append(sequence)

    def _pause_newest(self, step: PlannedStep, runnable: list[Sequence]) -> None:
        """Pause the newest runnable sequences until the paused ones hold the blocks that older
        sequences lack. Steps in flight forbid their preemption now; the next step preempts them.
        Does nothing if `max_paused_blocks` is above 0."""
        short = [s for s in self.paused if s.num_tokens > s.writable_end]
        if self._max_paused_blocks or not short:
            return
        num_missing = len(short)
        while num_missing > 0 and runnable and runnable[-1].order > short[0].order:
            newest = runnable.pop()
            num_missing -= len(newest.table.blocks) - newest.table.num_shared
            self._pause(newest, step)

    def _resume(self, step: PlannedStep, runnable: list[Sequence]) -> None:
        for sequence in runnable:
            if sequence.phase is Phase.PAUSED:
                sequence.phase = Phase.RUNNING
                self.paused.remove(sequence)
                step.resumed.append(sequence)

    def _preempt_excess(self, step: PlannedStep) -> None:
        """Preempt the newest paused sequences until the others hold at most `max_paused_blocks`.
        Does nothing if `max_paused_blocks` is 0. Sequences in flight, and the oldest sequence, are
        not preempted."""
        num_held = sum([len(s.table.blocks) for s in self.paused])
        for sequence in reversed(self.paused.copy()):
            if num_held <= self._max_paused_blocks or not self._max_paused_blocks:
                return
            if not sequence.num_in_flight and sequence is not self._sequences[0]:
                num_held -= len(sequence.table.blocks)
                self._preempt(sequence, step)
                if sequence in step.paused:
                    step.paused.remove(sequence)
