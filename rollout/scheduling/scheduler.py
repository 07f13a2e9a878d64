"""Scheduler: decides what runs in each step, and learns what came of it.

Continuous batching (Yu et al. 2022, "Orca") over a paged KV cache. Decode rows go first, prefill
chunks share what is left of `max_tokens`. All in a fixed order: higher priority, then arrival.
A request is admitted when the lengths that outputs are expected to have leave room for it.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rollout.blocks.block_manager import BlockManager
from rollout.scheduling.commit import Committed, commit_step
from rollout.scheduling.context import Context
from rollout.scheduling.forecast import MemoryForecast
from rollout.scheduling.plan_builder import PlanBuilder, PlannedRows
from rollout.scheduling.prefix_cache import PrefixCache
from rollout.scheduling.sequence import Phase, Sequence
from rollout.scheduling.stopping import StopRule
from rollout.step.output import StepOutput
from rollout.step.plan import RowSampling, StepPlan
from rollout.version_spans import VersionSpans

# Every so many admissions, the request that has waited longest is next, whatever its priority.
ADMISSIONS_PER_AGED = 16
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


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
class _BlockedHead:
    """The head of the queue that had no room, and when it is worth asking for it again."""

    order: tuple[int, int]
    weights_version: int
    # The forecast changes by whole blocks, so it is asked again after as many steps as a block
    # has tokens, or as soon as this many blocks are free.
    period: int
    num_free_blocks_needed: int


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
        schedule_conservativeness: float = 1.0,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self._blocks = block_manager
        self._prefixes = prefix_cache
        self._max_tokens = max_tokens
        self._chunked = enable_chunked_prefill
        forecast = MemoryForecast(block_manager, conservativeness=schedule_conservativeness)
        self._context = Context(block_manager, forecast, max_paused_blocks=max_paused_blocks)
        self._sequences: dict[int, Sequence] = {}
        self._in_flight: deque[PlannedRows] = deque()
        self._next_step_id = 0
        self._num_arrivals = 0
        self._num_admissions = 0
        self._admitted: list[Sequence] = []  # by the schedule that is being made
        self._leaders: dict[int, Sequence] = {}  # by group: whose prefill the others wait for
        self._blocked_head: _BlockedHead | None = None
        self._was_prefill_alone = False

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
        """Queue a request after those of its priority. A group is added one after another.

        Tokens beyond the first `num_prompt` were generated before.
        """
        num_blocks = self._blocks.blocks_for
        sequence = Sequence(
            request_id=request_id,
            order=(-priority, self._num_arrivals),
            group_id=group_id,
            tokens=array("i", tokens),  # 4 bytes a token, where a list takes 40
            num_prompt=num_prompt,
            sampling=sampling,
            stop_rule=stop_rule,
            wants_prompt_logprobs=wants_prompt_logprobs,
            num_prompt_blocks=num_blocks(num_prompt),
            max_blocks=num_blocks(stop_rule.max_length - 1),
            length_draw=_exponential_draw(self._num_arrivals),
        )
        self._num_arrivals += 1
        self._sequences[request_id] = sequence
        self._context.waiting.add(sequence)

    def remove(self, request_id: int) -> VersionSpans:
        """Take a request out, whatever it was doing. Returns who wrote its KV.

        Its blocks are free at once, or when no plan in flight uses them any more.
        """
        sequence = self._forget(request_id)
        self._context.finish(sequence)
        return sequence.kv_spans.copy()

    def _forget(self, request_id: int) -> Sequence:
        sequence = self._sequences.pop(request_id)
        if sequence.group_id is not None and self._leaders.get(sequence.group_id) is sequence:
            del self._leaders[sequence.group_id]
        return sequence

    def blocks_of(self, request_id: int) -> list[int]:
        """The request's blocks, also those it shares."""
        return self._sequences[request_id].blocks.copy()

    def active_ids(self) -> list[int]:
        """The requests that have rows: neither waiting nor ended."""
        return [sequence.request_id for sequence in self._context.active]

    def kv_spans(self, request_id: int) -> VersionSpans:
        """Which version wrote the KV of each of the request's positions, so far."""
        return self._sequences[request_id].kv_spans.copy()

    def used_blocks(self) -> list[int]:
        """Blocks that hold live KV, ascending."""
        return self._blocks.used_blocks()

    def uses_block(self, block: int) -> bool:
        """Whether the block holds live KV."""
        return self._blocks.is_used(block)

    def drop_unused_blocks(self) -> None:
        """Forget indexed blocks that no request uses."""
        self._blocks.drop_unused()

    def note_new_version(self) -> None:
        """The weights changed: blocks that only the old version could find are found no more."""
        if self._prefixes is not None and self._prefixes.is_isolated:
            self._blocks.start_index_generation()

    @property
    def is_idle(self) -> bool:
        """No request is queued, running or paused; plans of ended ones may be in flight."""
        return not self._sequences

    @property
    def num_waiting(self) -> int:
        return len(self._context.waiting)

    def counts(self) -> SchedulerCounts:
        """A snapshot."""
        num_paused = len(self._context.paused)
        return SchedulerCounts(
            num_waiting=self.num_waiting,
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
        reserved, self._admitted = self._context.reserve_in_order(), []
        builder.add_copies(reserved.copies, reserved.copied)
        may_admit = not (self._context.paused or reserved.preempted)
        num_hits = 0
        if may_admit and self._head_needs_the_step(len(reserved.runnable)):
            num_hits = self._admit(builder)
        self._was_prefill_alone = not builder.is_empty
        if builder.is_empty:
            self._add_running(builder, reserved.runnable)
            if may_admit:
                num_hits = self._admit(builder)
        return Schedule(
            plan=None if builder.is_empty else self._launch(builder),
            num_forked=len(builder.planned.forks),
            num_prefix_hit_tokens=num_hits,
            admitted=_ids(sorted(self._admitted, key=lambda s: s.order)),
            paused=_ids(reserved.paused),
            resumed=_ids(reserved.resumed),
            evicted=_ids(reserved.preempted),
        )

    def schedule_alone(self, request_id: int, weights_version: int) -> Schedule:
        """As `schedule`, but of this request and no other, whatever its place. With no plan in
        flight. It takes no prefix hit and forks nobody.
        """
        sequence = self._sequences[request_id]
        builder = PlanBuilder(self._next_step_id, weights_version)
        was_waiting = sequence.phase is Phase.WAITING
        reserved = self._context.reserve_alone(sequence)
        builder.add_copies(reserved.copies, reserved.copied)
        if sequence.is_on_device:
            builder.add_decodes([sequence])
        else:
            builder.add_prefill(sequence, min(sequence.num_uncomputed, self._max_tokens))
        return Schedule(
            plan=self._launch(builder),
            admitted=_ids([sequence] if was_waiting else []),
            resumed=_ids(reserved.resumed),
            evicted=_ids(reserved.preempted),
        )

    def commit(self, plan: StepPlan, output: StepOutput) -> Committed:
        """Take in the result of the oldest plan in flight. Finished requests leave."""
        planned = self._in_flight.popleft()
        assert planned.step_id == plan.step_id, "plans are committed in the order they were made"
        committed = commit_step(planned, plan, output)
        if self._prefixes is not None:
            for sequence, _ in planned.computed:
                # Also if it is gone: its blocks are there until the plan is settled, and children
                # of its fork go on from them. Tokens sampled after it went are not known.
                if len(sequence.kv_spans) <= len(sequence.tokens):
                    self._prefixes.index_written(sequence, plan.weights_version)
            for parent, child in planned.forks:
                child.share_index(parent)
        for finished in committed.finished:
            sequence = self._forget(finished.request_id)
            self._context.finish(sequence, has_stopped=finished.finish_reason == "stop")
        self._context.settle(planned)
        return committed

    def abandon(self) -> tuple[int, ...]:
        """The plans in flight failed: their requests start again from their committed tokens.

        Returns their ids.
        """
        touched: dict[int, Sequence] = {}
        while self._in_flight:
            planned = self._in_flight.popleft()
            # Copies that did not run leave those without KV whose tables name them.
            touched |= {id(s): s for s in (*planned.sequences(), *planned.copied)}
            self._context.settle(planned)
        active = (Phase.RUNNING, Phase.PAUSED)
        return _ids(self._context.requeue(s for s in touched.values() if s.phase in active))

    def requeue_active(self) -> tuple[int, ...]:
        """Send every running and paused request back to the queue, without KV. Returns ids."""
        return _ids(self._context.requeue(self._context.active))

    def requeue_older_than(self, version: int) -> tuple[int, ...]:
        """Send the requests whose oldest KV was written before `version` back to the queue."""
        too_old = [s for s in self._context.active if s.kv_spans and s.kv_spans.min() < version]
        return _ids(self._context.requeue(too_old))

    def _launch(self, builder: PlanBuilder) -> StepPlan:
        self._next_step_id += 1
        self._in_flight.append(builder.planned)
        return builder.build()

    # ---- prefill and admission

    def _add_running(self, builder: PlanBuilder, runnable: list[Sequence]) -> None:
        """Plan those in context: a token of each that decodes, then chunks of the prompts begun."""
        builder.add_decodes([s for s in runnable if s.is_on_device])
        if builder.num_tokens == len(runnable):
            return
        for sequence in runnable:
            if not sequence.is_on_device and (count := self._chunk_size(builder, sequence)):
                self._add_prefill(builder, sequence, count)

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

        Each takes a block of its own in the next step. A sibling that wants its prompt scored
        computes the prompt itself.
        """
        if leader.group_id is not None:
            self._leaders.pop(leader.group_id, None)
        leader.writable_end = 0  # its last block is shared now
        num_forked = 0
        for child in self._context.waiting.siblings(leader):
            if not child.is_fresh or child.wants_prompt_logprobs:
                continue
            if not self._blocks.num_free_rows or num_forked >= self._blocks.num_free_blocks:
                return
            child.num_shared_blocks = leader.num_computed // self._blocks.block_size
            if self._context.num_missing_blocks(child, 1, takes_later=True):
                child.num_shared_blocks = 0
                return
            num_forked += 1
            child.blocks = self._blocks.fork(leader.blocks)
            self._activate(child)
            builder.add_fork(leader, child)

    def _admit(self, builder: PlanBuilder) -> int:
        """Take requests from the queue, strictly in order, while rows, blocks and tokens last.

        Returns how many of their tokens were found in the prefix index.
        """
        waiting, num_hits = self._context.waiting, 0
        while len(waiting) and self._blocks.num_free_rows and builder.num_tokens < self._max_tokens:
            if self._num_admissions % ADMISSIONS_PER_AGED == ADMISSIONS_PER_AGED - 1:
                waiting.promote_longest_waiting()
            sequence = waiting.head
            if self._awaits_leader(sequence):
                break
            if self._is_still_blocked(sequence, builder.weights_version):
                break
            num_free = self._blocks.num_free_blocks
            num_found = self._adopt_prefix(sequence, builder.weights_version)
            count = self._chunk_size(builder, sequence)
            num_missing = self._take_first_blocks(sequence) if count else 0
            if num_missing:
                self._blocked_head = _BlockedHead(
                    order=sequence.order,
                    weights_version=builder.weights_version,
                    period=self._next_step_id // self._blocks.block_size,
                    num_free_blocks_needed=num_free + num_missing,
                )
            if not count or num_missing:
                self._blocks.release(sequence.blocks)
                sequence.restart()
                break
            num_hits += num_found
            self._activate(sequence)
            if sequence.group_id is not None and sequence.is_fresh:
                self._leaders[sequence.group_id] = sequence
            self._num_admissions += 1
            self._add_prefill(builder, sequence, count)
        return num_hits

    def _head_needs_the_step(self, num_running: int) -> bool:
        """Whether the head of the queue gets this step for itself, without chunked prefill.

        It does if it fits a step, but none with the running rows beside it. The running rows wait
        for that step, and the head of the queue waits for the one after.
        """
        if self._chunked or self._was_prefill_alone or not len(self._context.waiting):
            return False
        num_tokens = self._context.waiting.head.num_tokens
        return num_tokens <= self._max_tokens < num_tokens + num_running

    def _take_first_blocks(self, sequence: Sequence) -> int:
        """Give the head of the queue blocks for all tokens it has, if it is expected to fit.

        Returns how many blocks are missing. If any is, none is taken, and no cached one given up.
        """
        start, end = sequence.num_computed, sequence.num_tokens
        num_own = self._blocks.blocks_for(end) - len(sequence.blocks)
        num_missing = self._context.num_missing_blocks(sequence, num_own)
        if num_missing:
            return num_missing
        copies = self._blocks.reserve(sequence.blocks, start, end)
        assert copies == [], "blocks are free, and none of the prefix is written"
        sequence.writable_end = len(sequence.blocks) * self._blocks.block_size
        return 0

    def _is_still_blocked(self, head: Sequence, weights_version: int) -> bool:
        """Whether the head had no room in this period, and too few blocks are free since."""
        blocked = self._blocked_head
        return (
            blocked is not None
            and bool(self._context.active)
            and blocked.order == head.order
            and blocked.weights_version == weights_version
            and blocked.period == self._next_step_id // self._blocks.block_size
            and self._blocks.num_free_blocks < blocked.num_free_blocks_needed
        )

    def _activate(self, sequence: Sequence) -> None:
        self._context.activate(sequence)
        self._admitted.append(sequence)

    def _adopt_prefix(self, sequence: Sequence, version: int) -> int:
        """Pin blocks that hold the sequence's first tokens; the others are reserved after that."""
        if self._prefixes is not None:
            self._prefixes.adopt(sequence, version)
        return sequence.num_computed

    def _awaits_leader(self, sequence: Sequence) -> bool:
        """Its group's prompt is being computed now: it will be forked."""
        if sequence.group_id is None or not sequence.is_fresh or sequence.wants_prompt_logprobs:
            return False
        leader = self._leaders.get(sequence.group_id)
        if leader is None or leader.is_on_device:  # it was prefilled alone, without forking
            return False
        return leader.phase in (Phase.RUNNING, Phase.PAUSED)


def _exponential_draw(arrival: int) -> float:
    """Quantile `arrival` of a sequence that fills the exponential distribution evenly."""
    return -math.log1p(-((arrival + 0.5) * _GOLDEN_RATIO % 1.0))


def _ids(sequences: Iterable[Sequence]) -> tuple[int, ...]:
    return tuple(s.request_id for s in sequences)
