"""Context: which sequences hold rows and blocks, and the queue of those that do not."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollout.blocks.block_manager import BlockManager
from rollout.scheduling.forecast import MemoryForecast
from rollout.scheduling.plan_builder import PlannedRows
from rollout.scheduling.queue import RequestQueue
from rollout.scheduling.sequence import Phase, Sequence

Copies = list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Which sequences have blocks for their next tokens, in order; the block copies that must run
    first, and for whom; and who paused, resumed or was preempted over it.
    """

    runnable: list[Sequence] = field(default_factory=list)
    copies: Copies = field(default_factory=list)
    copied: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)
    resumed: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Context:
    """Moves sequences between the queue, running, paused and done, and their blocks with them.

    When blocks run out the newest sequence is preempted: its blocks are freed and it is queued
    again. With `max_paused_blocks` above 0, sequences that find no block pause instead and keep
    theirs, and are preempted when all of them together hold more than that.
    """

    def __init__(
        self, blocks: BlockManager, forecast: MemoryForecast, *, max_paused_blocks: int
    ) -> None:
        self.blocks = blocks
        self.waiting = RequestQueue()
        self.active: list[Sequence] = []  # running and paused, in order
        self.paused: list[Sequence] = []  # hold blocks but found none for their next token
        self._max_paused_blocks = max_paused_blocks
        self._forecast = forecast
        self._num_blocks_at_limits = 0  # if every active sequence came to its limit

    # ---- entering and leaving

    def activate(self, sequence: Sequence) -> None:
        """From the queue into a row. The caller has checked that one is free."""
        self.waiting.remove(sequence)
        sequence.phase = Phase.RUNNING
        sequence.row = self.blocks.take_row()
        sequence.is_new_row = True
        bisect.insort(self.active, sequence, key=lambda s: s.order)
        self._num_blocks_at_limits += sequence.max_blocks
        self._observe_length(sequence)

    def finish(self, sequence: Sequence, *, has_stopped: bool = False) -> None:
        """The sequence has ended. Its blocks and row are free at once, or when no plan in flight
        uses them.

        `has_stopped`: it came to its own end, not to a limit or to an abort.
        """
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
            sequence.phase = Phase.DONE
            return
        if has_stopped:
            self._forecast.lengths.stop(sequence.num_output_blocks - 1)
        self._deactivate(sequence)
        sequence.phase = Phase.DONE
        if not sequence.num_in_flight:
            self._free(sequence)

    def settle(self, planned: PlannedRows) -> None:
        """The plan is no longer in flight: free what only waited for that."""
        for sequence in planned.sequences():
            sequence.num_in_flight -= 1
            if sequence.phase is Phase.DONE and not sequence.num_in_flight:
                self._free(sequence)

    def requeue(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Take rows and blocks from active sequences and queue them at their places, in order."""
        ordered = sorted(sequences, key=lambda s: s.order)
        for sequence in ordered:
            assert not sequence.num_in_flight, "a plan in flight writes to its blocks"
            self._deactivate(sequence)
            self._free(sequence)
            sequence.restart()
            self.waiting.add(sequence)
        return ordered

    def _deactivate(self, sequence: Sequence) -> None:
        index = bisect.bisect_left(self.active, sequence.order, key=lambda s: s.order)
        assert self.active[index] is sequence
        del self.active[index]
        if sequence.phase is Phase.PAUSED:
            self.paused.remove(sequence)
        self._num_blocks_at_limits -= sequence.max_blocks

    def _free(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        self.blocks.release_row(sequence.row)

    # ---- what will fit

    def num_missing_blocks(
        self, sequence: Sequence, num_own: int, *, takes_later: bool = False
    ) -> int:
        """How many blocks are missing for `sequence` to run as well; 0 if it may.

        It takes `num_own` to begin with, at once, or in the next step if `takes_later`. The lengths
        expected of the active sequences and of this one must not overflow the pool. With nobody
        active there is always room for it to grow.
        """
        num_short = num_own - self.blocks.num_free_blocks
        if num_short > 0:
            return num_short
        at_limits = self._num_blocks_at_limits + sequence.max_blocks
        if not self.active or (
            at_limits <= self.blocks.num_blocks and not self._forecast.has_begun
        ):
            return 0
        return self._forecast.num_missing(
            self.active, sequence, num_own=num_own, takes_later=takes_later
        )

    def _observe_length(self, sequence: Sequence) -> None:
        """Tell the estimator of the output blocks that the sequence has begun."""
        num_begun = len(sequence.blocks) - sequence.num_prompt_blocks + 1
        if num_begun > sequence.num_output_blocks:
            self._forecast.lengths.begin(sequence.num_output_blocks, num_begun)
            sequence.num_output_blocks = num_begun

    # ---- blocks for the next step

    def reserve_in_order(self) -> Reservation:
        """Give each active sequence the blocks of its next tokens, oldest first."""
        self._forecast.start_step()
        reserved = Reservation()
        for sequence in self.active.copy():
            if sequence.num_tokens > sequence.writable_end:
                if sequence.phase is Phase.WAITING or sequence.num_tokens >= sequence.max_length:
                    continue  # preempted just now, or its last token is in flight
                if not self._reserve_or_preempt(sequence, reserved):
                    continue
            elif sequence.num_tokens >= sequence.max_length:
                continue
            reserved.runnable.append(sequence)
        if self.paused:
            self._hold_newest(reserved)
            self._resume(reserved)
            self._preempt_excess(reserved)
        return reserved

    def reserve_alone(self, sequence: Sequence) -> Reservation:
        """Have `sequence` in context, with blocks for its next tokens, whatever its place.

        Others are preempted if they hold what it needs.
        """
        reserved = Reservation()
        has_row = sequence.phase is not Phase.WAITING or self.blocks.num_free_rows > 0
        has_blocks = has_row and self._reserve(sequence, reserved)
        for newest in [] if has_blocks else reversed(self.active.copy()):
            if newest is not sequence:
                reserved.preempted.extend(self.requeue([newest]))
                if self._reserve(sequence, reserved):
                    break
        if sequence.phase is Phase.WAITING:
            self.activate(sequence)
        reserved.runnable.append(sequence)
        self._resume(reserved)
        return reserved

    def _reserve_or_preempt(self, sequence: Sequence, reserved: Reservation) -> bool:
        """Give the sequence its blocks, if need be those of newer ones; else it pauses."""
        while not self._reserve(sequence, reserved):
            if not self._preempt_for(sequence, reserved):
                self._pause(sequence, reserved)
                return False
            if sequence.phase is Phase.WAITING:
                return False  # it was the newest itself
        return True

    def _reserve(self, sequence: Sequence, reserved: Reservation) -> bool:
        start, end = sequence.num_computed, sequence.num_tokens
        copies = self.blocks.reserve(sequence.blocks, start, end)
        if copies is None:
            return False
        if copies:
            first = start // self.blocks.block_size
            sequence.num_blocks_sent = min(sequence.num_blocks_sent, first)
            reserved.copies.extend(copies)
            reserved.copied.append(sequence)
        sequence.writable_end = len(sequence.blocks) * self.blocks.block_size
        self._observe_length(sequence)
        return True

    def _preempt_for(self, sequence: Sequence, reserved: Reservation) -> bool:
        """Preempt the newest sequence that no plan in flight holds, if it is not older than
        `sequence`. Never the oldest: it always progresses. False if there is none.

        Where pausing is asked for, this is done for the oldest alone.
        """
        is_oldest = sequence is self.active[0]
        if self._max_paused_blocks and not is_oldest:
            return False
        for victim in reversed(self.active):
            if victim is self.active[0] or victim.order < sequence.order:
                return False
            if not victim.num_in_flight:
                self._forecast.observe_preemption(len(victim.blocks))
                reserved.preempted.extend(self.requeue([victim]))
                return True
        return False

    def _pause(self, sequence: Sequence, reserved: Reservation) -> None:
        if sequence.phase is not Phase.PAUSED:
            sequence.phase = Phase.PAUSED
            bisect.insort(self.paused, sequence, key=lambda s: s.order)
            reserved.paused.append(sequence)

    def _hold_newest(self, reserved: Reservation) -> None:
        """Plans in flight kept the newest from being preempted: they pause, and go next time.

        As many as hold the blocks that older ones wait for.
        """
        short = [s for s in self.paused if s.num_tokens > s.writable_end]
        if self._max_paused_blocks or not short:
            return
        num_missing, runnable = len(short), reserved.runnable
        while num_missing > 0 and runnable and runnable[-1].order > short[0].order:
            newest = runnable.pop()
            num_missing -= len(newest.blocks) - newest.num_shared_blocks
            self._pause(newest, reserved)

    def _resume(self, reserved: Reservation) -> None:
        for sequence in reserved.runnable:
            if sequence.phase is Phase.PAUSED:
                sequence.phase = Phase.RUNNING
                self.paused.remove(sequence)
                reserved.resumed.append(sequence)

    def _preempt_excess(self, reserved: Reservation) -> None:
        """Preempt the newest paused sequences until the others fit the buffer for them.

        Never the oldest active one: what it waits for is in flight.
        """
        num_held = sum(len(s.blocks) for s in self.paused)
        for sequence in reversed(self.paused.copy()):
            if num_held <= self._max_paused_blocks or not self._max_paused_blocks:
                return
            if not sequence.num_in_flight and sequence is not self.active[0]:
                num_held -= len(sequence.blocks)
                reserved.preempted.extend(self.requeue([sequence]))
                if sequence in reserved.paused:
                    reserved.paused.remove(sequence)
