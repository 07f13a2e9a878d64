"""Context: which sequences hold rows and blocks, and the queue of those that do not."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from rollout.blocks.block_manager import BlockManager
from rollout.scheduling.plan_builder import PlannedRows
from rollout.scheduling.queue import RequestQueue
from rollout.scheduling.sequence import Phase, Sequence

Copies = list[tuple[int, int]]


class Context:
    """Moves sequences between the queue, running, paused and done, and their blocks with them."""

    def __init__(self, blocks: BlockManager, *, max_paused_blocks: int) -> None:
        self.blocks = blocks
        self.waiting = RequestQueue()
        self.active: list[Sequence] = []  # running and paused, in order
        self._max_paused_blocks = max_paused_blocks

    @property
    def paused(self) -> list[Sequence]:
        """Those that hold blocks but found none for their next token, in order."""
        return [s for s in self.active if s.phase is Phase.PAUSED]

    # ---- entering and leaving

    def activate(self, sequence: Sequence) -> None:
        """From the queue into a row. The caller has checked that one is free."""
        self.waiting.remove(sequence)
        sequence.phase = Phase.RUNNING
        sequence.row = self.blocks.take_row()
        sequence.is_new_row = True
        bisect.insort(self.active, sequence, key=lambda s: s.order)

    def finish(self, sequence: Sequence) -> None:
        """For good. Blocks and row are free at once, or when no plan in flight uses them."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
            sequence.phase = Phase.DONE
            return
        self.active.remove(sequence)
        sequence.phase = Phase.DONE
        if not sequence.num_in_flight:
            self._free(sequence)

    def settle(self, behind: PlannedRows) -> None:
        """The plan is no longer in flight: free what only waited for that."""
        for sequence in (*(s for s, _ in behind.computed), *behind.sampled):
            sequence.num_in_flight -= 1
            if sequence.phase is Phase.DONE and not sequence.num_in_flight:
                self._free(sequence)

    def requeue(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Take rows and blocks from active sequences and queue them at their places, in order."""
        ordered = sorted(sequences, key=lambda s: s.order)
        for sequence in ordered:
            assert not sequence.num_in_flight, "a plan in flight writes to its blocks"
            self.active.remove(sequence)
            self._free(sequence)
            sequence.restart()
            self.waiting.add(sequence)
        return ordered

    def _free(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        self.blocks.release_row(sequence.row)

    # ---- blocks for the next step

    def reserve_in_order(self) -> tuple[list[Sequence], Copies, list[Sequence]]:
        """Give each active sequence the blocks of its next tokens; who gets none pauses.

        Returns (those that can run, the block copies they need, those evicted for the oldest).
        """
        runnable: list[Sequence] = []
        copies: Copies = []
        evicted: list[Sequence] = []
        for sequence in list(self.active):
            if sequence.phase is Phase.WAITING or sequence.is_full:
                continue  # evicted just now, or only awaiting its last token
            found = self._reserve(sequence)
            while found is None and sequence is self.active[0] and self._evict_newest(evicted):
                found = self._reserve(sequence)  # the oldest always progresses
            if found is None:
                sequence.phase = Phase.PAUSED
                continue
            sequence.phase = Phase.RUNNING
            runnable.append(sequence)
            copies += found
        return runnable, copies, evicted

    def evict_excess(self) -> list[Sequence]:
        """Evict the newest paused sequences until the others fit the buffer for paused requests.

        Never the oldest active one: what it waits for is in flight.
        """
        evicted: list[Sequence] = []
        paused = self.paused
        num_held = sum(len(s.blocks) for s in paused)
        while num_held > self._max_paused_blocks and paused:
            sequence = paused.pop()
            if not sequence.num_in_flight and sequence is not self.active[0]:
                num_held -= len(sequence.blocks)
                evicted += self.requeue([sequence])
        return evicted

    def _reserve(self, sequence: Sequence) -> Copies | None:
        start, end = sequence.num_computed, sequence.num_tokens
        copies = self.blocks.reserve(sequence.blocks, start, end)
        if copies:
            first = start // self.blocks.block_size
            sequence.num_blocks_sent = min(sequence.num_blocks_sent, first)
        return copies

    def _evict_newest(self, evicted: list[Sequence]) -> bool:
        """Evict the newest active sequence but the oldest; False if a plan in flight holds them."""
        for sequence in reversed(self.active[1:]):
            if not sequence.num_in_flight:
                evicted += self.requeue([sequence])
                return True
        return False
