"""Scheduler: decides what runs in each step, and learns what came of it.

Continuous batching (Yu et al. 2022, "Orca") over a paged KV cache. Decode rows go first, prefill
chunks share what is left of `max_tokens`. All in a fixed order: higher priority, then arrival.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rollout.blocks.block_manager import BlockManager
from rollout.scheduling.alone import plan_alone
from rollout.scheduling.commit import Committed, commit_step
from rollout.scheduling.context import Context
from rollout.scheduling.plan_builder import PlanBuilder, PlannedRows
from rollout.scheduling.prefix_cache import PrefixCache
from rollout.scheduling.sequence import Phase, Sequence
from rollout.scheduling.stopping import StopRule
from rollout.step.output import StepOutput
from rollout.step.plan import RowSampling, StepPlan
from rollout.version_spans import VersionSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What schedule() decided. `plan` is None if nothing can run; the rest are ids, in order."""

    plan: StepPlan | None
    num_forked: int = 0
    num_prefix_hit_tokens: int = 0
    admitted: tuple[int, ...] = ()
    paused: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCounts:
    """Requests by phase, and blocks; indexed blocks may be in use or not."""

    num_waiting: int
    num_running: int
    num_paused: int
    num_blocks_used: int
    num_blocks_indexed: int
    num_blocks_total: int


class Scheduler:
    """The brain's one door. `schedule` may be called again before `commit` of its plan."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_tokens: int,
        max_paused_blocks: int,
        enable_chunked_prefill: bool,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self._blocks, self._prefixes = block_manager, prefix_cache
        self._context = Context(block_manager, max_paused_blocks=max_paused_blocks)
        self._max_tokens, self._chunked = max_tokens, enable_chunked_prefill
        self._sequences: dict[int, Sequence] = {}
        self._in_flight: deque[PlannedRows] = deque()
        self._next_step_id = self._num_arrivals = 0

    # ---- requests

    def add(
        self,
        request_id: int,
        tokens: list[int],
        *,
        num_prompt: int,
        priority: int,
        group_id: int | None,
        sampling: RowSampling,
        stop_rule: StopRule,
        wants_prompt_logprobs: bool,
    ) -> None:
        """Queue a request behind those of its priority. A group is added one after another.

        Tokens beyond the first `num_prompt` were generated before.
        """
        sequence = Sequence(
            request_id=request_id,
            order=(-priority, self._num_arrivals),
            group_id=group_id,
            tokens=array("i", tokens),  # 4 bytes a token, where a list takes 40
            num_prompt=num_prompt,
            sampling=sampling,
            stop_rule=stop_rule,
            wants_prompt_logprobs=wants_prompt_logprobs,
        )
        self._num_arrivals += 1
        self._sequences[request_id] = sequence
        self._context.waiting.add(sequence)

    def remove(self, request_id: int) -> VersionSpans:
        """Take a request out, whatever it was doing. Returns who wrote its KV.

        Its blocks are free at once, or when no plan in flight uses them any more.
        """
        sequence = self._sequences.pop(request_id)
        self._context.finish(sequence)
        return sequence.kv_spans.copy()

    def kv_spans(self, request_id: int) -> VersionSpans:
        """Which version wrote the KV of each of the request's positions, so far."""
        return self._sequences[request_id].kv_spans.copy()

    def used_blocks(self) -> list[int]:
        """Blocks that hold live KV, ascending."""
        return self._blocks.used_blocks()

    def drop_unused_blocks(self) -> None:
        """Forget indexed blocks that no request uses."""
        self._blocks.drop_unused()

    def note_new_version(self) -> None:
        """The weights changed: indexed blocks that only the old version could find are freed."""
        if self._prefixes is not None and self._prefixes.is_isolated:
            self._blocks.drop_unused()

    @property
    def is_idle(self) -> bool:
        """No request is queued, running or paused; plans of ended ones may be in flight."""
        return not self._sequences

    def counts(self) -> SchedulerCounts:
        """A snapshot."""
        num_paused = len(self._context.paused)
        return SchedulerCounts(
            num_waiting=len(self._context.waiting),
            num_running=len(self._context.active) - num_paused,
            num_paused=num_paused,
            num_blocks_used=self._blocks.num_used_blocks,
            num_blocks_indexed=self._blocks.num_indexed_blocks,
            num_blocks_total=self._blocks.num_blocks,
        )

    # ---- one step

    def schedule(self, weights_version: int) -> Schedule:
        """Plan the next step and mark its tokens as planned. Changes blocks, rows and phases."""
        builder = PlanBuilder(self._next_step_id, weights_version)
        was = {id(s): s.phase for s in self._context.active}
        runnable, copies, evicted = self._context.reserve_in_order()
        evicted += self._context.evict_excess()
        builder.add_copies(copies)
        for sequence in runnable:
            if sequence.is_decoding:
                builder.add_decode(sequence)
        for sequence in runnable:
            if sequence.num_uncomputed > 0 and not sequence.is_on_device:
                count = self._chunk_size(builder, sequence)
                if count:
                    self._add_prefill(builder, sequence, count)
        paused = self._context.paused
        num_hits = 0 if paused or evicted else self._admit(builder)
        return Schedule(
            plan=None if builder.is_empty else self._launch(builder),
            num_forked=len(builder.behind.forks),
            num_prefix_hit_tokens=num_hits,
            admitted=_ids(s for s in self._context.active if id(s) not in was),
            paused=_ids(s for s in paused if was[id(s)] is Phase.RUNNING),
            resumed=_ids(s for s in runnable if was[id(s)] is Phase.PAUSED),
            evicted=_ids(evicted),
        )

    def schedule_alone(self, request_id: int, weights_version: int) -> Schedule:
        """As `schedule`, but of this request and no other. With no plan in flight."""
        sequence = self._sequences[request_id]
        builder = PlanBuilder(self._next_step_id, weights_version)
        admitted, evicted = plan_alone(self._context, sequence, builder, self._max_tokens)
        return Schedule(plan=self._launch(builder), admitted=_ids(admitted), evicted=_ids(evicted))

    def commit(self, plan: StepPlan, output: StepOutput) -> Committed:
        """Take in the result of the oldest plan in flight. Finished requests leave."""
        behind = self._in_flight.popleft()
        assert behind.step_id == plan.step_id, "plans are committed in the order they were made"
        committed = commit_step(behind, plan, output)
        if self._prefixes is not None:
            for sequence, _ in behind.computed:
                if sequence.phase is not Phase.DONE:
                    self._prefixes.note_written(sequence)
        for finished in committed.finished:
            self._context.finish(self._sequences.pop(finished.request_id))
        self._context.settle(behind)
        return committed

    def abandon(self) -> tuple[int, ...]:
        """The plans in flight failed: their requests start again from their committed tokens.

        Returns their ids.
        """
        touched: dict[int, Sequence] = {}
        while self._in_flight:
            behind = self._in_flight.popleft()
            touched |= {id(s): s for s in (*(s for s, _ in behind.computed), *behind.sampled)}
            self._context.settle(behind)
        return _ids(self._context.requeue(s for s in touched.values() if s.phase is not Phase.DONE))

    def requeue_active(self) -> tuple[int, ...]:
        """Send every running and paused request back to the queue, without KV. Returns ids."""
        return _ids(self._context.requeue(self._context.active))

    def requeue_older_than(self, version: int) -> tuple[int, ...]:
        """Send the requests whose oldest KV was written before `version` back to the queue.

        Nobody may share such KV any more: indexed blocks of it are freed.
        """
        too_old = [s for s in self._context.active if s.kv_spans and s.kv_spans.min() < version]
        requeued = _ids(self._context.requeue(too_old))
        self._blocks.drop_unused(older_than=version)
        return requeued

    def _launch(self, builder: PlanBuilder) -> StepPlan:
        self._next_step_id += 1
        self._in_flight.append(builder.behind)
        return builder.build()

    # ---- prefill and admission

    def _chunk_size(self, builder: PlanBuilder, sequence: Sequence) -> int:
        """Tokens of the sequence's prefill that this step has room for; 0 if it must wait.

        Without chunked prefill a prompt runs whole or not at all, unless no step could hold it:
        once begun, it takes what it can get.
        """
        room = max(0, self._max_tokens - builder.num_tokens)
        if sequence.num_uncomputed <= room:
            return sequence.num_uncomputed
        has_begun = sequence.phase is Phase.RUNNING
        in_parts = self._chunked or has_begun or sequence.num_uncomputed > self._max_tokens
        return room if in_parts else 0

    def _add_prefill(self, builder: PlanBuilder, sequence: Sequence, count: int) -> None:
        """Plan a chunk; with the last one, fork the waiting samples of the same prompt."""
        builder.add_prefill(sequence, count)
        if sequence.is_on_device and sequence.is_fresh:
            self._fork_group(builder, sequence)

    def _fork_group(self, builder: PlanBuilder, leader: Sequence) -> None:
        """The leader's siblings share its KV and its logits, as far as rows and blocks go.

        Each will want a block of its own. One that wants its prompt scored computes it itself.
        """
        limit = min(self._blocks.num_free_rows, self._blocks.num_free_blocks)
        siblings = self._context.waiting.siblings(leader)
        fresh = [s for s in siblings if s.is_fresh and not s.wants_prompt_logprobs]
        for child in fresh[:limit]:
            child.blocks = self._blocks.fork(leader.blocks)
            self._context.activate(child)
            builder.add_fork(leader, child)

    def _admit(self, builder: PlanBuilder) -> int:
        """Take requests from the queue, strictly in order, while rows, blocks and tokens last.

        Returns how many of their tokens were found in the prefix index.
        """
        num_hits = 0
        while len(self._context.waiting) and self._blocks.num_free_rows:
            sequence = self._context.waiting.head
            if self._awaits_leader(sequence):
                break
            num_found = self._adopt_prefix(sequence, builder.weights_version)
            count = self._chunk_size(builder, sequence)
            table, end = sequence.blocks, sequence.num_tokens
            if not count or self._blocks.reserve(table, sequence.num_computed, end) is None:
                self._blocks.release(table)
                sequence.restart()
                break
            num_hits += num_found
            self._context.activate(sequence)
            self._add_prefill(builder, sequence, count)
        return num_hits

    def _adopt_prefix(self, sequence: Sequence, version: int) -> int:
        """Pin blocks that hold the sequence's first tokens; the others are reserved after that."""
        if self._prefixes is not None:
            self._prefixes.adopt(sequence, version)
        return sequence.num_computed

    def _awaits_leader(self, sequence: Sequence) -> bool:
        """Its group's prompt is being computed now: it will be forked."""
        if sequence.group_id is None or not sequence.is_fresh or sequence.wants_prompt_logprobs:
            return False
        return any(
            s.group_id == sequence.group_id and s.is_fresh and not s.is_on_device
            for s in self._context.active
        )


def _ids(sequences: Iterable[Sequence]) -> tuple[int, ...]:
    return tuple(s.request_id for s in sequences)
