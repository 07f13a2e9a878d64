"""Scheduler: decides what runs in each step, and learns what came of it.

Continuous batching (Yu et al. 2022, "Orca") over a paged KV cache. Decode rows go first, prefill chunks share
what is left of `max_tokens`. All in a fixed order: higher priority, then arrival.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rollout.blocks.block_manager import BlockManager
from rollout.scheduling.commit import Committed, commit_step
from rollout.scheduling.plan_builder import PlanBuilder, PlannedRows
from rollout.scheduling.queue import RequestQueue
from rollout.scheduling.sequence import Phase, Sequence
from rollout.scheduling.stopping import StopRule
from rollout.step.output import StepOutput
from rollout.step.plan import RowSampling, StepPlan
from rollout.version_spans import VersionSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What schedule() decided. `plan` is None if nothing can run now. The rest are request ids, in order."""

    plan: StepPlan | None
    num_forked: int
    admitted: tuple[int, ...]
    paused: tuple[int, ...]
    resumed: tuple[int, ...]
    evicted: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCounts:
    """Requests by phase, and blocks."""

    num_waiting: int
    num_running: int
    num_paused: int
    num_blocks_used: int
    num_blocks_total: int


class Scheduler:
    """Waiting, running and paused sequences. `schedule` may be called again before `commit` of its plan."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_tokens: int,
        max_paused_blocks: int,
        enable_chunked_prefill: bool,
    ) -> None:
        self._blocks = block_manager
        self._max_tokens = max_tokens
        self._max_paused_blocks = max_paused_blocks
        self._chunked = enable_chunked_prefill
        self._waiting = RequestQueue()
        self._active: list[Sequence] = []  # running and paused, in order
        self._sequences: dict[int, Sequence] = {}
        self._in_flight: deque[PlannedRows] = deque()
        self._next_step_id = 0
        self._num_arrivals = 0

    # ---- requests

    def add(
        self,
        request_id: int,
        tokens: list[int],
        *,
        priority: int,
        group_id: int | None,
        sampling: RowSampling,
        stop_rule: StopRule,
        wants_prompt_logprobs: bool,
    ) -> None:
        """Queue a request behind those of its priority. Members of a group are added one after another."""
        sequence = Sequence(
            request_id=request_id,
            order=(-priority, self._num_arrivals),
            group_id=group_id,
            tokens=tokens,
            num_prompt=len(tokens),
            sampling=sampling,
            stop_rule=stop_rule,
            wants_prompt_logprobs=wants_prompt_logprobs,
        )
        self._num_arrivals += 1
        self._sequences[request_id] = sequence
        self._waiting.add(sequence)

    def remove(self, request_id: int) -> VersionSpans:
        """Take a request out, whatever it was doing. Returns who wrote its KV.

        Its blocks are free at once, or when no plan in flight uses them any more.
        """
        sequence = self._sequences.pop(request_id)
        self._finish(sequence)
        return sequence.kv_spans.copy()

    def kv_spans(self, request_id: int) -> VersionSpans:
        """Which version wrote the KV of each of the request's positions, so far."""
        return self._sequences[request_id].kv_spans.copy()

    def used_blocks(self) -> list[int]:
        """Blocks that hold live KV, ascending."""
        return self._blocks.used_blocks()

    def counts(self) -> SchedulerCounts:
        paused = sum(s.phase is Phase.PAUSED for s in self._active)
        return SchedulerCounts(
            num_waiting=len(self._waiting),
            num_running=len(self._active) - paused,
            num_paused=paused,
            num_blocks_used=self._blocks.num_used_blocks,
            num_blocks_total=self._blocks.num_blocks,
        )

    # ---- one step

    def schedule(self, weights_version: int) -> Schedule:
        """Plan the next step and mark its tokens as planned. Changes blocks, rows and phases."""
        builder = PlanBuilder(self._next_step_id, weights_version)
        evicted: list[Sequence] = []
        was = {id(s): s.phase for s in self._active}
        runnable = self._reserve_in_order(builder, evicted)
        self._evict_excess(evicted)
        for sequence in runnable:
            if sequence.is_decoding:
                builder.add_decode(sequence)
        for sequence in runnable:
            if sequence.num_uncomputed > 0 and not sequence.is_on_device:
                count = self._chunk_size(builder, sequence)
                if count:
                    self._add_prefill(builder, sequence, count)
        paused = [s for s in self._active if s.phase is Phase.PAUSED]
        if not paused and not evicted:
            self._admit(builder)
        return Schedule(
            plan=None if builder.is_empty else self._launch(builder),
            num_forked=len(builder.behind.forks),
            admitted=_ids(s for s in self._active if id(s) not in was),
            paused=_ids(s for s in paused if was[id(s)] is Phase.RUNNING),
            resumed=_ids(s for s in runnable if was[id(s)] is Phase.PAUSED),
            evicted=_ids(evicted),
        )

    def commit(self, plan: StepPlan, output: StepOutput) -> Committed:
        """Take in the result of the oldest plan in flight. Finished requests leave; their tokens are counted."""
        behind = self._in_flight.popleft()
        assert behind.step_id == plan.step_id, "plans are committed in the order they were made"
        committed = commit_step(behind, plan, output)
        for sampled in committed.sampled:
            if sampled.finish_reason is not None:
                self._finish(self._sequences.pop(sampled.request_id))
        self._settle(behind)
        return committed

    def abandon(self, plan: StepPlan) -> tuple[int, ...]:
        """The forward pass of `plan` failed: its requests start again from their tokens. Returns their ids."""
        behind = self._in_flight.popleft()
        assert behind.step_id == plan.step_id
        assert not self._in_flight
        touched = {id(s): s for s, _ in behind.computed} | {id(s): s for s in behind.sampled}
        self._settle(behind)
        return self.requeue(s for s in touched.values() if s.phase is not Phase.DONE)

    def requeue_older_than(self, version: int) -> tuple[int, ...]:
        """Send the requests whose oldest KV was written before `version` back to the queue."""
        return self.requeue([s for s in self._active if len(s.kv_spans) and s.kv_min < version])

    def requeue_active(self) -> tuple[int, ...]:
        """Send every running and paused request back to the queue, without KV. Returns their ids in order."""
        return self.requeue(list(self._active))

    def requeue(self, sequences: Iterable[Sequence]) -> tuple[int, ...]:
        """Release the sequences' blocks and rows, and queue them at their places."""
        ordered = sorted(sequences, key=lambda s: s.order)
        for sequence in ordered:
            assert not sequence.num_in_flight, "a plan in flight still writes into its blocks"
            self._active.remove(sequence)
            self._free(sequence)
            sequence.restart()
            self._waiting.add(sequence)
        return _ids(ordered)

    # ---- pausing and evicting

    def _reserve_in_order(self, builder: PlanBuilder, evicted: list[Sequence]) -> list[Sequence]:
        """Give each active sequence the blocks of its next tokens; who gets none pauses. Returns who runs."""
        runnable = []
        for sequence in list(self._active):
            if sequence.phase is Phase.WAITING or sequence.is_full:
                continue  # evicted just now, or only awaiting its last token
            copies = self._reserve(sequence)
            while copies is None and sequence is self._active[0] and self._evict_newest(evicted):
                copies = self._reserve(sequence)  # the oldest always progresses
            if copies is None:
                sequence.phase = Phase.PAUSED
                continue
            sequence.phase = Phase.RUNNING
            builder.add_copies(copies)
            runnable.append(sequence)
        return runnable

    def _reserve(self, sequence: Sequence) -> list[tuple[int, int]] | None:
        start, end = sequence.num_computed, sequence.num_tokens
        copies = self._blocks.reserve(sequence.blocks, start, end)
        if copies:
            sequence.num_blocks_sent = min(
                sequence.num_blocks_sent, start // self._blocks.block_size
            )
        return copies

    def _evict_newest(self, evicted: list[Sequence]) -> bool:
        """Evict the newest active sequence but the oldest; False if a plan in flight holds them all."""
        for sequence in reversed(self._active[1:]):
            if not sequence.num_in_flight:
                self.requeue([sequence])
                evicted.append(sequence)
                return True
        return False

    def _evict_excess(self, evicted: list[Sequence]) -> None:
        """Evict the newest paused sequences until the others fit the buffer for paused requests.

        Never the oldest active one: what it waits for is in flight.
        """
        paused = [s for s in self._active if s.phase is Phase.PAUSED]
        num_held = sum(len(s.blocks) for s in paused)
        while num_held > self._max_paused_blocks and paused:
            sequence = paused.pop()
            if not sequence.num_in_flight and sequence is not self._active[0]:
                num_held -= len(sequence.blocks)
                self.requeue([sequence])
                evicted.append(sequence)

    # ---- prefill and admission

    def _chunk_size(self, builder: PlanBuilder, sequence: Sequence) -> int:
        """Tokens of the sequence's prefill that this step still has room for; 0 if it must wait.

        Without chunked prefill a prompt runs whole or not at all, unless no step could hold it;
        once begun, it takes what it can get.
        """
        room = max(0, self._max_tokens - builder.num_tokens)
        if sequence.num_uncomputed <= room:
            return sequence.num_uncomputed
        has_begun = sequence.num_computed > 0
        in_parts = self._chunked or has_begun or sequence.num_uncomputed > self._max_tokens
        return room if in_parts else 0

    def _add_prefill(self, builder: PlanBuilder, sequence: Sequence, count: int) -> None:
        """Plan a chunk; with the last one, fork the waiting samples of the same prompt."""
        builder.add_prefill(sequence, count)
        if sequence.is_on_device and _is_fresh(sequence):
            self._fork_group(builder, sequence)

    def _fork_group(self, builder: PlanBuilder, leader: Sequence) -> None:
        """The leader's siblings share its KV and its logits, as far as rows and blocks go; each will want a block.

        A sibling that wants its prompt scored computes its prompt itself.
        """
        limit = min(self._blocks.num_free_rows, self._blocks.num_free_blocks)
        siblings = self._waiting.siblings(leader)
        fresh = [s for s in siblings if _is_fresh(s) and not s.wants_prompt_logprobs]
        for child in fresh[:limit]:
            child.blocks = self._blocks.fork(leader.blocks)
            self._activate(child)
            builder.add_fork(leader, child)

    def _admit(self, builder: PlanBuilder) -> None:
        """Take requests from the queue, strictly in order, while rows, blocks and tokens last."""
        while len(self._waiting) and self._blocks.num_free_rows:
            sequence = self._waiting.head
            count = self._chunk_size(builder, sequence)
            if not count or self._awaits_leader(sequence):
                return
            if self._blocks.reserve(sequence.blocks, 0, sequence.num_tokens) is None:
                return
            self._activate(sequence)
            self._add_prefill(builder, sequence, count)

    def _awaits_leader(self, sequence: Sequence) -> bool:
        """Its group's prompt is being computed now: it will be forked."""
        if sequence.group_id is None or not _is_fresh(sequence) or sequence.wants_prompt_logprobs:
            return False
        return any(
            s.group_id == sequence.group_id and _is_fresh(s) and not s.is_on_device
            for s in self._active
        )

    # ---- leaving and entering the context

    def _activate(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        sequence.phase = Phase.RUNNING
        sequence.row = self._blocks.take_row()
        sequence.is_new_row = True
        bisect.insort(self._active, sequence, key=lambda s: s.order)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
            sequence.phase = Phase.DONE
            return
        self._active.remove(sequence)
        sequence.phase = Phase.DONE
        if not sequence.num_in_flight:
            self._free(sequence)

    def _settle(self, behind: PlannedRows) -> None:
        """The plan is no longer in flight: free what only waited for that."""
        for sequence in (*(s for s, _ in behind.computed), *behind.sampled):
            sequence.num_in_flight -= 1
            if sequence.phase is Phase.DONE and not sequence.num_in_flight:
                self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._blocks.release(sequence.blocks)
        self._blocks.release_row(sequence.row)

    def _launch(self, builder: PlanBuilder) -> StepPlan:
        self._next_step_id += 1
        self._in_flight.append(builder.behind)
        return builder.build()


def _is_fresh(sequence: Sequence) -> bool:
    """Nothing of it has been sampled and committed yet."""
    return len(sequence.tokens) == sequence.num_prompt


def _ids(sequences: Iterable[Sequence]) -> tuple[int, ...]:
    return tuple(s.request_id for s in sequences)
