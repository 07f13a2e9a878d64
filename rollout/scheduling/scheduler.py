"""Scheduler: decides what runs in each step, and updates the requests from the step's result.

It does continuous batching (Yu et al. 2022, "Orca") over a paged KV cache. Decode rows go first,
and prefill chunks share the tokens that are left of `max_tokens`. Requests run in a fixed order:
higher priority first, then arrival. A request is admitted when the expected lengths of all outputs
leave room for it.

`rollout.engine.build` creates it. StepPipeline calls `schedule` and `update_from_output`. Engine
adds and ends requests. Suspension queues running requests again.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.blocks.kv_cache_manager import BlockTable, KVCacheManager
from rollout.blocks.prefix_index import root_key
from rollout.blocks.routing_record import RoutingRecord
from rollout.errors import NonFiniteLogitsError
from rollout.sampling_params import SamplingParams
from rollout.scheduling.forecast import ASSUMED_OUTPUT_TOKENS, MemoryForecast, length_draw
from rollout.scheduling.integrity import find_violations
from rollout.scheduling.output import SchedulerOutput, StepUpdate
from rollout.scheduling.planned_step import PlannedStep
from rollout.scheduling.queues import RequestQueue, RunningRequests
from rollout.scheduling.sequence import Phase, Sequence, request_id_of
from rollout.scheduling.stopping import StopRule
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan
from rollout.telemetry import SchedulerCounts
from rollout.version_spans import VersionSpans

# Every 16th admission takes the request that has waited longest, whatever its priority.
ADMISSIONS_PER_AGED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockedHead:
    """The head of the queue that found no room, and the conditions to try it again."""

    order: tuple[int, int]
    weights_version: int
    # The forecast changes by whole blocks, so the head is tried again after `block_size` steps.
    period: int
    num_free_blocks_needed: int


class Scheduler:
    """Implements `SchedulerInterface`. Only the scheduler and its parts write sequences.

    `schedule` may be called again before the result of its plan is known. `in_flight` has the
    planned steps without a result, oldest first. Each of `requests` is either in `waiting`, or in
    `running` with a row and blocks. A preempted request returns to its old place in the queue.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_tokens: int,
        max_paused_blocks: int,
        enable_chunked_prefill: bool,
        schedule_conservativeness: float = 1.0,
        routing: RoutingRecord | None = None,
    ) -> None:
        """`routing` is the record of the tokens' experts; None if experts are not recorded."""
        self.kv_cache_manager = self._kv = kv_cache_manager
        self.requests: dict[int, Sequence] = {}
        self.waiting = RequestQueue()
        self.in_flight: deque[PlannedStep] = deque()
        self.max_tokens = max_tokens
        self._enable_chunked_prefill = enable_chunked_prefill
        self._forecast = MemoryForecast(
            kv_cache_manager, conservativeness=schedule_conservativeness
        )
        self._routing = routing
        self.running = RunningRequests(
            kv_cache_manager, self._forecast, max_paused_blocks=max_paused_blocks, routing=routing
        )
        self._next_step_id = 0
        self._num_arrivals = 0
        self._num_admissions = 0
        # For each group the sample whose prefill the other samples wait for.
        self._leaders: dict[int, Sequence] = {}
        self._blocked_head: _BlockedHead | None = None
        self._was_prefill_alone = False
        self._num_without_room = 0  # requests for which the last step had no room

    # ---- requests

    def add_request(
        self,
        request_id: int,
        tokens: list[int],
        *,
        num_prompt: int,
        priority: int,
        group_id: int | None,
        sampling_params: SamplingParams,
        seed: int,
        stop_rule: StopRule,
        wants_prompt_logprobs: bool,
    ) -> None:
        """Queue a request behind the requests of its priority. Tokens after the first `num_prompt`
        were generated earlier. Samples of one group have the same `group_id` and are added one
        after another."""
        sequence = Sequence(
            request_id=request_id,
            order=(-priority, self._num_arrivals),
            group_id=group_id,
            tokens=array("i", tokens),  # 4 bytes a token, where a list takes 40
            num_prompt=num_prompt,
            sampling_params=sampling_params,
            seed=seed,
            stop_rule=stop_rule,
            wants_prompt_logprobs=wants_prompt_logprobs,
            num_prompt_blocks=self._kv.blocks_for(num_prompt),
            max_blocks=self._kv.blocks_for(stop_rule.max_length - 1),
            assumed_blocks=self._kv.blocks_for(
                _assumed_length(num_prompt, sampling_params, stop_rule) - 1
            ),
            length_draw=length_draw(self._num_arrivals),
            table=BlockTable(root_key=root_key(sampling_params.cache_salt)),
        )
        self._num_arrivals += 1
        self.requests[request_id] = sequence
        self.waiting.add(sequence)

    def finish_request(self, request_id: int) -> VersionSpans:
        """End a request in any phase. Returns the version that wrote each position's KV. Its blocks
        are freed at once, or as soon as no plan in flight uses them."""
        sequence = self.requests[request_id]
        self._finish(sequence)
        return sequence.kv_spans.copy()

    def request_ids(self) -> Collection[int]:
        return self.requests.keys()

    def running_ids(self) -> list[int]:
        """Return the ids of the requests that have rows."""
        return [sequence.request_id for sequence in self.running]

    def kv_spans(self, request_id: int) -> VersionSpans:
        """Return a copy of the versions that wrote the KV of the positions computed so far."""
        return self.requests[request_id].kv_spans.copy()

    def routing(self, request_id: int) -> NDArray[np.int16] | None:
        """Return the experts of the positions with committed KV; None if experts are not
        recorded."""
        sequence = self.requests[request_id]
        if self._routing is None or not sequence.table.blocks:
            return None
        return self._routing.read(sequence.table.blocks, len(sequence.kv_spans))

    @property
    def num_routing_bytes(self) -> int:
        """Bytes of the routing record; 0 if experts are not recorded."""
        return 0 if self._routing is None else self._routing.num_bytes

    @property
    def is_idle(self) -> bool:
        """Whether there is no request. Plans of ended requests may still be in flight."""
        return not self.requests

    def counts(self) -> SchedulerCounts:
        """Return the current number of requests in each phase, and the numbers of blocks."""
        num_paused = len(self.running.paused)
        return SchedulerCounts(
            num_waiting=len(self.waiting),
            num_without_room=min(self._num_without_room, len(self.waiting)),
            num_running=len(self.running) - num_paused,
            num_paused=num_paused,
            num_blocks_used=self._kv.num_used_blocks,
            num_blocks_indexed=self._kv.prefix_index.num_entries,
            num_blocks_total=self._kv.num_blocks,
        )

    def violations(self) -> list[str]:
        """Return the violated invariants of queue, rows and blocks, one sentence each."""
        waiting, running = list(self.waiting), list(self.running)
        return find_violations(
            self.requests, waiting, running, self.in_flight, self.kv_cache_manager
        )

    # ---- one step

    def schedule(self, weights_version: int) -> SchedulerOutput:
        """Plan the next step and put it in flight. Changes blocks, rows, phases and counts."""
        step = PlannedStep(self._next_step_id, weights_version)
        runnable = self.running.allocate(step)
        for sequence in step.preempted:
            self.waiting.add(sequence)
        may_admit = len(self.waiting) > 0 and not (self.running.paused or step.preempted)
        if may_admit and self._head_needs_the_step(len(runnable)):
            self._admit(step)
        self._was_prefill_alone = step.num_tokens > 0
        if not step.num_tokens:
            self._add_running(step, runnable)
            if may_admit:
                self._admit(step)
        return self._enter_flight(step)

    def schedule_alone(self, request_id: int, weights_version: int) -> SchedulerOutput:
        """Plan a step of this request alone, regardless of its place in the queue. No plan may be
        in flight. The request does not use cached prefixes and forks no group."""
        sequence = self.requests[request_id]
        step = PlannedStep(self._next_step_id, weights_version)
        self.running.allocate_alone(sequence, step)
        for preempted in step.preempted:
            self.waiting.add(preempted)
        if sequence.phase is Phase.WAITING:
            self._start_running(sequence, step)
        if sequence.is_on_device:
            step.add_decodes([sequence])
        else:
            step.add_prefill(sequence, min(sequence.num_uncomputed, self.max_tokens))
        return self._enter_flight(step)

    def _enter_flight(self, step: PlannedStep) -> SchedulerOutput:
        """Put a step in flight if it has tokens. Returns its plan and decisions."""
        has_queue = len(self.waiting) > 0
        is_deferred = has_queue and self._awaits_leader(self.waiting.head)
        self._num_without_room = 0 if is_deferred else len(self.waiting)
        if step.num_tokens:
            self._next_step_id += 1
            self.in_flight.append(step)
        output = step.output()
        if self._routing is not None and output.plan is not None:
            self._routing.launch(output.plan.copy_sources, output.plan.copy_targets)
        return output

    def update_from_output(self, plan: StepPlan, output: StepOutput) -> StepUpdate:
        """Write the result of the oldest plan in flight into its sequences. Finished requests leave
        the scheduler. Returns the changes for the records."""
        step = self.in_flight.popleft()
        assert step.step_id == plan.step_id, "results come in the order of the plans"
        if self._routing is not None:
            assert output.slots_T is not None
            assert output.routing_TLK is not None
            self._routing.commit(output.slots_T, output.routing_TLK)
        update = step.update_from_output(output)
        if self._kv.enable_prefix_caching:
            step.cache_blocks(self._kv)
        for finished in update.finished:
            sequence = self.requests[finished.request_id]
            if isinstance(finished.error, NonFiniteLogitsError):
                self._distrust_kv_of(sequence, plan.weights_version)
            self._finish(sequence, has_stopped=finished.finish_reason == "stop")
        self.running.leave_flight(step)
        return update

    def _distrust_kv_of(self, sequence: Sequence, version: int) -> None:
        """Exclude KV that may have caused non-finite logits under `version` from prefix matches."""
        # If all of the request's KV is of this version, later versions do not match it. If some is
        # older, the older KV may be the cause and is not matched any more.
        self._kv.distrust(version - 1 if sequence.kv_spans.min() < version else version)

    def abandon(self) -> tuple[int, ...]:
        """Drop the plans in flight, which have failed, and queue their requests again. The requests
        keep their committed tokens. Returns the ids of these requests."""
        touched: dict[int, Sequence] = {}
        while self.in_flight:
            step = self.in_flight.popleft()
            # A block copy of the step has perhaps not run, so sequences that hold its target are
            # queued again, too.
            touched |= {id(s): s for s in (*step.sequences(), *step.copied)}
            self.running.leave_flight(step)
        has_row = (Phase.RUNNING, Phase.PAUSED)
        requeued = self._requeue([s for s in touched.values() if s.phase in has_row])
        if self._routing is not None:
            self._routing.abandon()  # after the rows of these requests were read
        return requeued

    def requeue_running(self) -> tuple[int, ...]:
        """Queue all requests that have rows again, without their KV. Returns their ids."""
        return self._requeue(self.running)

    def requeue_older_than(self, version: int) -> tuple[int, ...]:
        """Queue the requests again that have KV written before `version`. Returns their ids."""
        return self._requeue([s for s in self.running if s.kv_spans and s.kv_spans.min() < version])

    # ---- from queue to row, and back

    def _start_running(self, sequence: Sequence, step: PlannedStep) -> None:
        """Move a waiting sequence to a row. The caller has checked that a row is free."""
        self.waiting.remove(sequence)
        self.running.add(sequence)
        step.admitted.append(sequence)

    def _requeue(self, sequences: Iterable[Sequence]) -> tuple[int, ...]:
        """Move running sequences back to their places in the queue. Returns their ids."""
        released = self.running.release(sequences)
        for sequence in released:
            self.waiting.add(sequence)
        return tuple(map(request_id_of, released))

    def _finish(self, sequence: Sequence, *, has_stopped: bool = False) -> None:
        del self.requests[sequence.request_id]
        if sequence.group_id is not None and self._leaders.get(sequence.group_id) is sequence:
            del self._leaders[sequence.group_id]
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
            sequence.phase = Phase.FINISHED
        else:
            self.running.finish(sequence, has_stopped=has_stopped)

    # ---- prefill and admission

    def _add_running(self, step: PlannedStep, runnable: list[Sequence]) -> None:
        """Plan a token for each sequence that decodes, then chunks of prompts whose prefill has
        begun."""
        step.add_decodes([s for s in runnable if s.is_on_device])
        if step.num_tokens == len(runnable):
            return
        for sequence in runnable:
            if not sequence.is_on_device and (count := self._chunk_size(step, sequence)):
                self._add_prefill(step, sequence, count)

    def _chunk_size(self, step: PlannedStep, sequence: Sequence) -> int:
        """Return how many tokens of the sequence's prefill this step computes; 0 if it must wait.
        Without chunked prefill a prompt waits until all of it fits. A prompt longer than any step,
        or whose prefill has begun, gets the room that is left."""
        room = max(0, self.max_tokens - step.num_tokens)
        if sequence.num_uncomputed <= room:
            return sequence.num_uncomputed
        has_begun = sequence.phase is Phase.RUNNING
        is_too_long = sequence.num_uncomputed > self.max_tokens
        return room if self._enable_chunked_prefill or has_begun or is_too_long else 0

    def _add_prefill(self, step: PlannedStep, sequence: Sequence, count: int) -> None:
        """Plan a chunk of a prompt. With the last chunk, fork the waiting samples of the same
        prompt."""
        step.add_prefill(sequence, count)
        if sequence.is_on_device and sequence.is_fresh:
            self._fork_group(step, sequence)

    def _fork_group(self, step: PlannedStep, leader: Sequence) -> None:
        """Start as many waiting siblings of the leader as rows and blocks allow. Siblings share the
        leader's KV and logits, and each takes its own block in the next step. A sibling whose
        prompt must be scored computes the prompt itself."""
        if leader.group_id is not None:
            self._leaders.pop(leader.group_id, None)
        leader.writable_end = 0  # its last block is shared now
        num_forked = 0
        for child in self.waiting.siblings(leader):
            if not child.is_fresh or child.wants_prompt_logprobs:
                continue
            if not self._kv.num_free_rows or num_forked >= self._kv.num_free_blocks:
                return
            child.table.num_shared = leader.num_computed // self._kv.block_size
            if self._forecast.num_missing_blocks(self.running, child, 1, takes_later=True):
                child.table.num_shared = 0
                return
            num_forked += 1
            self._kv.fork(leader.table, child.table)
            self._start_running(child, step)
            step.add_fork(leader, child)

    def _admit(self, step: PlannedStep) -> None:
        """Admit requests from the queue, strictly in order, while rows, blocks and tokens last."""
        while len(self.waiting) and self._kv.num_free_rows and step.num_tokens < self.max_tokens:
            if self._num_admissions % ADMISSIONS_PER_AGED == ADMISSIONS_PER_AGED - 1:
                self.waiting.promote_longest_waiting()
            sequence = self.waiting.head
            if self._awaits_leader(sequence) or self._is_still_blocked(sequence, step):
                break
            num_free = self._kv.num_free_blocks
            self._match_prefix(sequence, step.weights_version)
            count = self._chunk_size(step, sequence)
            num_missing = self._allocate_first(sequence) if count else 0
            if num_missing:
                self._blocked_head = _BlockedHead(
                    order=sequence.order,
                    weights_version=step.weights_version,
                    period=self._next_step_id // self._kv.block_size,
                    num_free_blocks_needed=num_free + num_missing,
                )
            if not count or num_missing:
                self._kv.free(sequence.table)
                sequence.restart()
                break
            sequence.num_cached = sequence.num_computed
            step.num_prefix_hit_tokens += sequence.num_cached
            self._start_running(sequence, step)
            if sequence.group_id is not None and sequence.is_fresh:
                self._leaders[sequence.group_id] = sequence
            self._num_admissions += 1
            self._add_prefill(step, sequence, count)

    def _match_prefix(self, sequence: Sequence, weights_version: int) -> None:
        """Give the sequence the cached blocks of its first tokens, which then count as computed."""
        if not sequence.scores_prompt:  # scoring needs the logits of all prompt tokens
            spans = self._kv.match_prefix(sequence.table, sequence.tokens, weights_version)
            sequence.kv_spans.extend(spans)
            sequence.num_computed = len(spans)

    def _head_needs_the_step(self, num_running: int) -> bool:
        """Return whether the head of the queue gets the next step for itself. The queue is not
        empty.

        It does if chunked prefill is off and its prompt fits a step only without the running rows.
        The running rows then wait for that step, and the next such prompt waits for a later step.
        """
        if self._enable_chunked_prefill or self._was_prefill_alone:
            return False
        num_tokens = self.waiting.head.num_tokens
        return num_tokens <= self.max_tokens < num_tokens + num_running

    def _allocate_first(self, sequence: Sequence) -> int:
        """Give the head of the queue blocks for all its tokens, if it is expected to fit. Returns
        how many blocks are missing. If any block is missing, none is taken and no cached block is
        evicted."""
        start, end = sequence.num_computed, sequence.num_tokens
        num_own = self._kv.blocks_for(end) - len(sequence.table.blocks)
        num_missing = self._forecast.num_missing_blocks(self.running, sequence, num_own)
        if num_missing:
            return num_missing
        copies = self._kv.allocate(sequence.table, start, end)
        assert copies == [], "blocks are free, and none of the prefix is written"
        sequence.writable_end = len(sequence.table.blocks) * self._kv.block_size
        return 0

    def _is_still_blocked(self, head: Sequence, step: PlannedStep) -> bool:
        """Return whether the head found no room earlier, and nothing has changed that can give it
        room."""
        blocked = self._blocked_head
        return (
            blocked is not None
            and len(self.running) > 0
            and blocked.order == head.order
            and blocked.weights_version == step.weights_version
            and blocked.period == self._next_step_id // self._kv.block_size
            and self._kv.num_free_blocks < blocked.num_free_blocks_needed
        )

    def _awaits_leader(self, sequence: Sequence) -> bool:
        """Return whether another sample of the group computes the prompt now, and will fork
        `sequence`."""
        if sequence.group_id is None or not sequence.is_fresh or sequence.wants_prompt_logprobs:
            return False
        leader = self._leaders.get(sequence.group_id)
        if leader is None or leader.is_on_device:  # it was prefilled alone, without forking
            return False
        return leader.phase in (Phase.RUNNING, Phase.PAUSED)


def _assumed_length(num_prompt: int, params: SamplingParams, rule: StopRule) -> int:
    """Return the length that a request is assumed to reach before any output has stopped."""
    is_limited = params.num_tokens_to_generate is not None or params.num_tokens_total is not None
    assumed = rule.max_length if is_limited else num_prompt + ASSUMED_OUTPUT_TOKENS
    return min(rule.max_length, assumed)
