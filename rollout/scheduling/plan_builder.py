"""PlanBuilder: gathers the rows of one step and packs them into a StepPlan."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rollout.scheduling.sequence import Sequence
from rollout.step.plan import EMPTY, IntArray, RowSampling, StepPlan


@dataclass(slots=True, kw_only=True)
class PlannedRows:
    """The sequences of a plan in flight, by what it does for them: the scheduler's half of the
    contract.
    """

    step_id: int
    # (sequence, number of tokens computed)
    computed: list[tuple[Sequence, int]] = field(default_factory=list)
    # (parent, child)
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    # those with a block that is copied before the step; they may have no other part in it
    copied: list[Sequence] = field(default_factory=list)
    # (sequence, number of prompt tokens scored)
    scored: list[tuple[Sequence, int]] = field(default_factory=list)
    # (sequence, number of prompt tokens done with this step)
    prefilled: list[tuple[Sequence, int]] = field(default_factory=list)

    def sequences(self) -> list[Sequence]:
        """All that compute or sample in the plan, each once."""
        return [sequence for sequence, _ in self.computed] + [child for _, child in self.forks]


class PlanBuilder:
    """Decode rows are added first, then prefill rows; order is the order of the step's tokens."""

    def __init__(self, step_id: int, weights_version: int) -> None:
        self._step_id = step_id
        self.weights_version = weights_version
        self.planned = PlannedRows(step_id=step_id)
        self.num_tokens = 0
        self._num_decode_rows = 0
        self._rows: list[int] = []
        self._query_lens: list[int] = []
        self._context_lens: list[int] = []
        self._prefill_token_ids: list[int] = []
        self._new_rows: list[tuple[int, RowSampling]] = []
        self._counted: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._table: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._copies: list[tuple[int, int]] = []
        self._samples: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._scores: tuple[list[int], list[int]] = ([], [])
        self._score_top_n = 0

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def add_copies(self, copies: list[tuple[int, int]], sequences: list[Sequence]) -> None:
        """Blocks to copy before the step, and the sequences whose tables name the copies."""
        self._copies.extend(copies)
        self.planned.copied.extend(sequences)

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """One token of each, its row's last sampled one. Before all other rows."""
        assert not self._rows, "decode rows come first"
        for sequence in sequences:
            sequence.num_in_flight += 1
            sequence.num_computed += 1
            sequence.num_tokens += 1
            if sequence.num_blocks_sent != len(sequence.blocks):
                self._send_blocks(sequence)
        self.num_tokens = self._num_decode_rows = len(sequences)
        self._rows = [sequence.row for sequence in sequences]
        self._query_lens = [1] * len(sequences)
        self._context_lens = [sequence.num_computed for sequence in sequences]
        # A token is drawn from each, for the position behind its context.
        self._samples = (list(range(len(sequences))), self._rows.copy(), self._context_lens.copy())
        self.planned.computed = [(sequence, 1) for sequence in sequences]
        self.planned.sampled = sequences.copy()

    def add_prefill(self, sequence: Sequence, count: int) -> None:
        """The next `count` known tokens; the last of all of them also samples."""
        start, end = sequence.num_computed, sequence.num_computed + count
        self._prefill_token_ids.extend(sequence.tokens[start:end])
        first_source = self.num_tokens
        if sequence.scores_prompt:
            self._add_scores(sequence, first_source, start, end)
        self._add_compute(sequence, count)
        self.planned.prefilled.append((sequence, end))
        if end == sequence.num_tokens:
            self._add_sample(sequence)

    def add_fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` samples from the logits that `parent`, the row just added, samples from."""
        self.planned.forks.append((parent, child))
        self.planned.prefilled.append((child, parent.num_computed))
        child.num_computed = parent.num_computed
        child.num_in_flight += 1
        self._add_sample(child)

    def _add_sample(self, sequence: Sequence) -> None:
        """Draw the sequence's next token from the step's newest token."""
        if sequence.is_new_row:
            self._add_new_row(sequence)
        sources, rows, positions = self._samples
        sources.append(self.num_tokens - 1)
        rows.append(sequence.row)
        positions.append(sequence.num_tokens)
        self.planned.sampled.append(sequence)
        sequence.num_tokens += 1
        sequence.is_on_device = True

    def _add_new_row(self, sequence: Sequence) -> None:
        """Send its sampling parameters, and the tokens it has if its draws count them."""
        sequence.is_new_row = False
        self._new_rows.append((sequence.row, sequence.sampling))
        processing = sequence.sampling.processing
        if processing is not None and processing.has_penalty:
            rows, lens, token_ids = self._counted
            rows.append(sequence.row)
            lens.append(len(sequence.tokens))
            token_ids.extend(sequence.tokens)

    def _add_compute(self, sequence: Sequence, count: int) -> None:
        sequence.num_computed += count
        sequence.num_in_flight += 1
        self.num_tokens += count
        self._rows.append(sequence.row)
        self._query_lens.append(count)
        self._context_lens.append(sequence.num_computed)
        self.planned.computed.append((sequence, count))
        self._send_blocks(sequence)

    def _send_blocks(self, sequence: Sequence) -> None:
        """The entries of its block table that the muscle does not know."""
        table_rows, table_indices, table_blocks = self._table
        for index in range(sequence.num_blocks_sent, len(sequence.blocks)):
            table_rows.append(sequence.row)
            table_indices.append(index)
            table_blocks.append(sequence.blocks[index])
        sequence.num_blocks_sent = len(sequence.blocks)

    def _add_scores(self, sequence: Sequence, first_source: int, start: int, end: int) -> None:
        sources, targets = self._scores
        last = min(end, sequence.num_prompt - 1)
        if last <= start:
            return  # the last prompt token has nothing to score, nor have those after it
        sources.extend(range(first_source, first_source + last - start))
        targets.extend(sequence.tokens[start + 1 : last + 1])
        self.planned.scored.append((sequence, last - start))
        self._score_top_n = max(self._score_top_n, sequence.sampling.top_n)

    def build(self) -> StepPlan:
        sources, targets = zip(*self._copies, strict=True) if self._copies else ((), ())
        return StepPlan(
            step_id=self._step_id,
            weights_version=self.weights_version,
            num_decode_rows=self._num_decode_rows,
            rows=_ints(self._rows),
            query_lens=_ints(self._query_lens),
            context_lens=_ints(self._context_lens),
            prefill_token_ids=_ints(self._prefill_token_ids),
            new_rows=tuple(self._new_rows),
            counted_rows=_ints(self._counted[0]),
            counted_lens=_ints(self._counted[1]),
            counted_token_ids=_ints(self._counted[2]),
            table_rows=_ints(self._table[0]),
            table_indices=_ints(self._table[1]),
            table_blocks=_ints(self._table[2]),
            copy_sources=_ints(sources),
            copy_targets=_ints(targets),
            sample_sources=_ints(self._samples[0]),
            sample_rows=_ints(self._samples[1]),
            sample_positions=_ints(self._samples[2]),
            score_sources=_ints(self._scores[0]),
            score_targets=_ints(self._scores[1]),
            score_top_n=self._score_top_n,
        )


def _ints(values: list[int] | tuple[int, ...]) -> IntArray:
    return np.array(values, dtype=np.int32) if values else EMPTY
