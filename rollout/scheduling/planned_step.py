"""PlannedStep: one step, from the scheduler's decisions to its result.

`rollout.scheduling.scheduler` creates it and adds its rows. RunningRequests of
`rollout.scheduling.queues` adds block copies, pauses and preemptions.
`rollout.scheduling.integrity` reads the steps in flight. PlannedStep changes the step's sequences
and indexes their blocks.
"""

from __future__ import annotations

import numpy as np

from rollout.blocks.kv_cache_manager import KVCacheManager
from rollout.errors import DetokenizeError, NonFiniteLogitsError
from rollout.scheduling.output import (
    FinishedRequest,
    PrefilledPrompt,
    SchedulerOutput,
    ScoredPrompt,
    StepUpdate,
)
from rollout.scheduling.sequence import Phase, Sequence, order_of, request_id_of
from rollout.scheduling.stopping import Stop, check_stop
from rollout.step.output import SampleResult, StepOutput
from rollout.step.plan import EMPTY, IntArray, NewRow, StepPlan


class PlannedStep:
    """One step: its sequences, the work for each of them, and its StepPlan.

    The scheduler adds rows: first rows that decode, then prefills and forks. The step's tokens
    have the order of the rows. Adding a row raises the counts of its sequence. `output` returns the
    rows as a StepPlan, and `update_from_output` writes the step's result into the sequences.
    """

    def __init__(self, step_id: int, weights_version: int) -> None:
        self.step_id, self.weights_version = step_id, weights_version
        self.num_tokens = 0
        # The scheduler's decisions, reported in its output.
        self.admitted: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.resumed: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.num_prefix_hit_tokens = 0
        # The work of the step.
        self.computed: list[tuple[Sequence, int]] = []  # number of tokens
        self.forks: list[tuple[Sequence, Sequence]] = []  # (parent, child)
        self.sampled: list[Sequence] = []
        self.scored: list[tuple[Sequence, int]] = []  # number of prompt tokens
        self.prefilled: list[tuple[Sequence, int]] = []  # number of tokens with KV after the step
        # Sequences with a block that is copied before the step; some have no row in the step.
        self.copied: list[Sequence] = []
        # The fields of the plan.
        self._num_decode_rows = 0
        self._rows: list[int] = []
        self._query_lens: list[int] = []
        self._context_lens: list[int] = []
        self._prefill_token_ids: list[int] = []
        self._new_rows: list[NewRow] = []
        self._table_rows: list[int] = []
        self._table_indices: list[int] = []
        self._table_blocks: list[int] = []
        self._copy_sources: list[int] = []
        self._copy_targets: list[int] = []
        self._copy_lengths: list[int] = []
        self._sample_sources: list[int] = []
        self._sample_rows: list[int] = []
        self._sample_positions: list[int] = []
        self._score_sources: list[int] = []
        self._score_targets: list[int] = []
        self._score_top_n, self._score_ranks = 0, False

    def sequences(self) -> list[Sequence]:
        """Return the sequences that compute or sample in the step, each once."""
        return [sequence for sequence, _ in self.computed] + [child for _, child in self.forks]

    # ---- planning

    def add_copies(
        self, copies: list[tuple[int, int]], num_written: list[int], sequence: Sequence
    ) -> None:
        """Add block copies that run before the step. `copies` has (source, target) pairs of block
        ids. `num_written` has the number of tokens to copy from each block. `sequence` holds the
        targets."""
        for (source, target), count in zip(copies, num_written, strict=True):
            self._copy_sources.append(source)
            self._copy_targets.append(target)
            self._copy_lengths.append(count)
        self.copied.append(sequence)

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """Add a row for each sequence that decodes. Call it before all other rows are added. Such a
        row computes the sequence's newest token and samples the next one."""
        assert not self.num_tokens, "decode rows come first"
        for sequence in sequences:
            sequence.num_in_flight += 1
            sequence.num_computed += 1
            sequence.num_tokens += 1
            if sequence.num_blocks_sent != len(sequence.table.blocks):
                self._send_blocks(sequence)
        self.num_tokens = self._num_decode_rows = len(sequences)
        self._rows = [sequence.table.row for sequence in sequences]
        self._query_lens = [1] * len(sequences)
        self._context_lens = [sequence.num_computed for sequence in sequences]
        self._sample_sources = list(range(len(sequences)))
        self._sample_rows = self._rows.copy()
        self._sample_positions = self._context_lens.copy()
        self.computed = [(sequence, 1) for sequence in sequences]
        self.sampled = sequences.copy()

    def add_prefill(self, sequence: Sequence, count: int) -> None:
        """Add a row that computes the next `count` known tokens of a sequence. If they include the
        last known token, the next token is sampled."""
        start, end = sequence.num_computed, sequence.num_computed + count
        self._prefill_token_ids.extend(sequence.tokens[start:end])
        if sequence.scores_prompt:
            self._add_scores(sequence, start, end)
        sequence.num_computed = end
        sequence.num_in_flight += 1
        self.num_tokens += count
        self._rows.append(sequence.table.row)
        self._query_lens.append(count)
        self._context_lens.append(end)
        self.computed.append((sequence, count))
        self._send_blocks(sequence)
        self.prefilled.append((sequence, end))
        if end == sequence.num_tokens:
            self._add_sample(sequence)

    def add_fork(self, parent: Sequence, child: Sequence) -> None:
        """Sample a token for `child` from the logits of `parent`, whose row was added last. The
        child shares the KV of the parent."""
        self.forks.append((parent, child))
        self.prefilled.append((child, parent.num_computed))
        child.num_computed, child.num_cached = parent.num_computed, parent.num_cached
        child.num_in_flight += 1
        self._add_sample(child)

    def _add_sample(self, sequence: Sequence) -> None:
        """Sample the sequence's next token from the logits of the token that was added last."""
        if sequence.is_new_row:
            self._add_new_row(sequence)
        self._sample_sources.append(self.num_tokens - 1)
        self._sample_rows.append(sequence.table.row)
        self._sample_positions.append(sequence.num_tokens)
        self.sampled.append(sequence)
        sequence.num_tokens += 1
        sequence.is_on_device = True

    def _add_new_row(self, sequence: Sequence) -> None:
        sequence.is_new_row = False
        params = sequence.sampling_params
        self._new_rows.append(
            NewRow(
                row=sequence.table.row,
                sampling_params=params,
                seed=sequence.seed,
                num_prompt=sequence.num_prompt,
                end_ids=sequence.stop_rule.end_ids,
                token_ids=sequence.tokens[:] if params.has_penalties else (),
            )
        )

    def _send_blocks(self, sequence: Sequence) -> None:
        """Add the entries of the sequence's block table that no plan has contained yet."""
        blocks = sequence.table.blocks
        for index in range(sequence.num_blocks_sent, len(blocks)):
            self._table_rows.append(sequence.table.row)
            self._table_indices.append(index)
            self._table_blocks.append(blocks[index])
        sequence.num_blocks_sent = len(blocks)

    def _add_scores(self, sequence: Sequence, start: int, end: int) -> None:
        """Add scores for the prompt tokens that follow the positions [start, end)."""
        last = min(end, sequence.num_prompt - 1)
        if last <= start:
            return  # no prompt token follows these positions
        first_source = self.num_tokens
        self._score_sources.extend(range(first_source, first_source + last - start))
        self._score_targets.extend(sequence.tokens[start + 1 : last + 1])
        self.scored.append((sequence, last - start))
        params = sequence.sampling_params
        self._score_top_n = max(self._score_top_n, params.top_n_logprobs)
        self._score_ranks |= params.return_ranks

    def build_plan(self) -> StepPlan:
        """Return the rows as a StepPlan of int32 arrays."""
        columns: dict[str, list[int]] = {
            "rows": self._rows,
            "query_lens": self._query_lens,
            "context_lens": self._context_lens,
            "prefill_token_ids": self._prefill_token_ids,
            "table_rows": self._table_rows,
            "table_indices": self._table_indices,
            "table_blocks": self._table_blocks,
            "copy_sources": self._copy_sources,
            "copy_targets": self._copy_targets,
            "copy_lengths": self._copy_lengths,
            "sample_sources": self._sample_sources,
            "sample_rows": self._sample_rows,
            "sample_positions": self._sample_positions,
            "score_sources": self._score_sources,
            "score_targets": self._score_targets,
        }
        arrays: dict[str, IntArray] = {}
        for name, values in columns.items():
            arrays[name] = np.array(values, dtype=np.int32) if values else EMPTY
        return StepPlan(
            step_id=self.step_id,
            weights_version=self.weights_version,
            num_decode_rows=self._num_decode_rows,
            new_rows=tuple(self._new_rows),
            score_top_n=self._score_top_n,
            score_ranks=self._score_ranks,
            **arrays,
        )

    def output(self) -> SchedulerOutput:
        """Return the plan and the decisions of this step."""
        return SchedulerOutput(
            plan=self.build_plan() if self.num_tokens else None,
            num_forked=len(self.forks),
            num_prefix_hit_tokens=self.num_prefix_hit_tokens,
            admitted=tuple(map(request_id_of, sorted(self.admitted, key=order_of))),
            paused=tuple(map(request_id_of, self.paused)),
            resumed=tuple(map(request_id_of, self.resumed)),
            preempted=tuple(map(request_id_of, self.preempted)),
        )

    # ---- the result

    def update_from_output(self, output: StepOutput) -> StepUpdate:
        """Append the step's KV versions and sampled tokens to the sequences. Returns the changes
        for records. Sequences that have ended since the step was planned get no token."""
        for sequence, count in self.computed:
            # Ended sequences are included: the children of their forks use the same blocks.
            sequence.kv_spans.append(count, self.weights_version)
        for parent, child in self.forks:
            if child.phase is not Phase.FINISHED:
                child.kv_spans = parent.kv_spans.copy()
        samples = output.samples
        token_ids: list[int] = samples.token_ids_S.tolist()
        sampled = [s for s in self.sampled if s.phase is not Phase.FINISHED]
        indices: range | list[int] = range(len(token_ids))
        failed: list[Sequence] = []
        if len(sampled) < len(token_ids) or np.count_nonzero(samples.is_finite_S) < len(token_ids):
            indices, failed = self._split_samples(samples)
            sampled = [self.sampled[index] for index in indices]
            token_ids = [token_ids[index] for index in indices]
        finished = _append(sampled, token_ids)
        finished += [self._non_finite(sequence) for sequence in failed]
        return StepUpdate(
            weights_version=self.weights_version,
            request_ids=[sequence.request_id for sequence in sampled],
            token_ids=token_ids,
            sample_indices=indices,
            finished=finished,
            prefilled=[
                PrefilledPrompt(
                    request_id=s.request_id,
                    num_tokens=num_tokens,
                    num_cached_tokens=s.num_cached,
                    kv_spans=s.kv_spans,
                )
                for s, num_tokens in self.prefilled
                if s.phase is not Phase.FINISHED
            ],
            scored=self._scored_prompts() if self.scored else [],
        )

    def cache_blocks(self, kv_cache_manager: KVCacheManager) -> None:
        """Index the blocks that the step has filled. Call it after `update_from_output`."""
        for sequence, _ in self.computed:
            # An ended sequence is included: it holds its blocks while the step is in flight, and
            # the children of its fork use them. Tokens sampled after its end are not known.
            if len(sequence.kv_spans) <= len(sequence.tokens):
                kv_cache_manager.cache_blocks(
                    sequence.table, sequence.tokens, sequence.kv_spans, self.weights_version
                )
        for parent, child in self.forks:
            kv_cache_manager.copy_cache_state(parent.table, child.table)

    def _split_samples(self, samples: SampleResult) -> tuple[list[int], list[Sequence]]:
        """Return the sample rows with a token, and the sequences whose logits were not finite."""
        is_finite = samples.is_finite_S.tolist()
        alive = [i for i, s in enumerate(self.sampled) if s.phase is not Phase.FINISHED]
        return (
            [index for index in alive if is_finite[index]],
            [self.sampled[index] for index in alive if not is_finite[index]],
        )

    def _non_finite(self, sequence: Sequence) -> FinishedRequest:
        error = NonFiniteLogitsError(
            f"request {sequence.request_id}: the logits for its next token are not finite under "
            f"weights version {self.weights_version}; check the weights for NaN, infinity or "
            "overflow"
        )
        return _finished(sequence, Stop("error"), error)

    def _scored_prompts(self) -> list[ScoredPrompt]:
        scored, start = [], 0
        for sequence, count in self.scored:
            end = start + count
            if sequence.phase is not Phase.FINISHED:
                scored.append(ScoredPrompt(request_id=sequence.request_id, start=start, end=end))
            start = end
        return scored


def _append(sampled: list[Sequence], token_ids: list[int]) -> list[FinishedRequest]:
    """Append one token to each sequence. Returns the requests that end with their token."""
    finished = []
    for sequence, token_id in zip(sampled, token_ids, strict=True):
        tokens, rule = sequence.tokens, sequence.stop_rule
        tokens.append(token_id)
        # A call of check_stop for each token would take most of the time here.
        if token_id in rule.end_ids or len(tokens) >= sequence.max_length or rule.stop_words:
            stop: Stop | None
            error: Exception | None = None
            try:
                stop = check_stop(tokens, sequence.num_prompt, rule)
            except DetokenizeError as fault:  # ends its own request only
                stop, error = Stop("error"), fault
            if stop is not None:
                finished.append(_finished(sequence, stop, error))
    return finished


def _finished(sequence: Sequence, stop: Stop, error: Exception | None) -> FinishedRequest:
    return FinishedRequest(
        request_id=sequence.request_id,
        finish_reason=stop.finish_reason,
        stop_reason=stop.stop_reason,
        kv_spans=sequence.kv_spans.copy(),
        error=error,
    )
