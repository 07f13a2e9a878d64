"""FakeWorker: runs a StepPlan on lists instead of tensors, and asserts that the plan makes sense.

The next token is a pure function of (token history, request seed, position), so whatever ran beside
a request, or was thrown away and computed again, must not change it. The history is read back from
the blocks that the plan names, never taken from the caller: a wrong table gives wrong tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, fields

import numpy as np

from rollout.step.output import SampleResult, ScoreResult, StepOutput
from rollout.step.plan import NewRow, StepPlan
from rollout.step.seeds import mix_seed

VOCAB_SIZE = 29
TOP_N = 2


def next_token(history: Tokens[int], seed: int, position: int) -> int:
    """The token at `position` after `history`."""
    return mix_seed(seed, position, hash(tuple(history))) % VOCAB_SIZE


def token_score(history: Tokens[int], target: int) -> float:
    """The log-prob of `target` after `history`."""
    return -float(mix_seed(target, hash(tuple(history))) % 1024) / 64.0


def values_of(plan: StepPlan) -> list[object]:
    """Return the contents of a plan as comparable values."""
    values = (getattr(plan, field.name) for field in fields(plan))
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]


@dataclass(frozen=True, slots=True)
class Entry:
    """The KV of one position: its token, the version that wrote it, and which write it was."""

    token: int
    version: int
    write_id: int


@dataclass(slots=True)
class Tenant:
    """One request's stay in a row, as the plans so far tell it. `writes` is the KV it must find."""

    writes: list[Entry] = field(default_factory=list)
    table: dict[int, int] = field(default_factory=dict)
    new_row: NewRow | None = None
    last_token: int | None = None
    last_position: int | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """Effects of a plan. `contexts`: for each sample row, the versions it attended to."""

    plan: StepPlan
    contexts: list[list[int]]


class FakeWorker:
    """Blocks 1..num_blocks of lists, rows 1..num_rows. Tokens in `poison` have no finite logits."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        poison: frozenset[int] = frozenset(),
    ) -> None:
        self.num_blocks, self.block_size, self.num_rows = num_blocks, block_size, num_rows
        self.ran: dict[int, Ran] = {}
        self._poison = poison
        self._blocks: dict[int, list[Entry | None]] = {
            block: [None] * block_size for block in range(1, num_blocks + 1)
        }
        self._tenants: dict[int, Tenant] = {}
        self._num_writes = 0

    def run(self, plan: StepPlan) -> StepOutput:
        """Copies first, then writes, then samples and scores; asserts on the way."""
        self._check_shapes(plan)
        starts = np.cumsum([0, *plan.query_lens]).tolist()
        self._start_tenancies(plan)
        self._take_tables(plan)
        self._inherit_prefixes(plan)
        self._copy(plan)
        histories = self._write(plan, starts)
        return self._output(plan, histories)

    def check_row(self, row: int) -> None:
        """Whoever holds `row` finds its KV as it was written, also if it does not run just now."""
        tenant = self._tenants[row]
        if tenant.table:
            self._read(tenant, len(tenant.writes))

    def versions(self, row: int) -> list[int]:
        """Who wrote the KV of the row's positions."""
        return [entry.version for entry in self._tenants[row].writes]

    # ---- the parts of a step

    def _check_shapes(self, plan: StepPlan) -> None:
        rows, tables = plan.rows.tolist(), set(plan.table_rows.tolist())
        assert len(rows) == len(set(rows)), "a row computes twice in one step"
        assert len(plan.query_lens) == len(plan.context_lens) == len(rows)
        assert (plan.query_lens > 0).all()
        assert (plan.query_lens[: plan.num_decode_rows] == 1).all()
        assert plan.num_tokens == plan.query_lens.sum()
        assert tables <= set(rows), "a table changes of a row that does not compute"
        assert len(plan.sample_rows) == len(set(plan.sample_rows.tolist()))
        assert len(plan.score_sources) == len(plan.score_targets)
        for row in (
            *rows,
            *tables,
            *plan.sample_rows.tolist(),
            *(new.row for new in plan.new_rows),
        ):
            assert 1 <= row <= self.num_rows
        blocks = (*plan.table_blocks, *plan.copy_sources, *plan.copy_targets)
        assert all(1 <= block <= self.num_blocks for block in blocks)

    def _start_tenancies(self, plan: StepPlan) -> None:
        """A prefill row whose table is sent from the start begins a stay, and so does a fork."""
        prefilling = set(plan.rows[plan.num_decode_rows :].tolist())
        for row in plan.table_rows[plan.table_indices == 0].tolist():
            if row in prefilling:
                self._tenants[row] = Tenant()
        for new in plan.new_rows:
            if new.row not in plan.rows:
                self._tenants[new.row] = Tenant()
            tenant = self._tenants[new.row]
            assert tenant.new_row is None, f"row {new.row} is announced twice"
            tenant.new_row = new

    def _take_tables(self, plan: StepPlan) -> None:
        changes = zip(plan.table_rows, plan.table_indices, plan.table_blocks, strict=True)
        for row, index, block in changes:
            self._tenants[int(row)].table[int(index)] = int(block)

    def _inherit_prefixes(self, plan: StepPlan) -> None:
        """A stay that begins behind position 0 finds whole blocks of KV that others computed."""
        columns = (plan.rows, plan.query_lens, plan.context_lens)
        for row, query_len, context_len in zip(*(c.tolist() for c in columns), strict=True):
            tenant, num_shared = self._tenants[row], context_len - query_len
            if tenant.writes or not num_shared:
                continue
            assert num_shared % self.block_size == 0, "part of a block is shared"
            places = [self._place(tenant, position) for position in range(num_shared)]
            for block, offset in places:
                entry = self._blocks[block][offset]
                assert entry is not None, "a shared position was never written"
                tenant.writes.append(entry)

    def _copy(self, plan: StepPlan) -> None:
        sources, targets = plan.copy_sources.tolist(), plan.copy_targets.tolist()
        assert len(targets) == len(set(targets)), "two copies into one block"
        assert not set(sources) & set(targets), "the copies depend on their order"
        columns = zip(sources, targets, plan.copy_lengths.tolist(), strict=True)
        for source, target, length in columns:
            unwritten = [None] * (self.block_size - length)
            self._blocks[target] = [*self._blocks[source][:length], *unwritten]

    def _write(self, plan: StepPlan, starts: list[int]) -> list[list[Entry]]:
        """Write the KV of all tokens, then read the context of each token back."""
        prefill = iter(plan.prefill_token_ids.tolist())
        rows = plan.rows.tolist()
        written: set[tuple[int, int]] = set()
        for index, row in enumerate(rows):
            tenant = self._tenants[row]
            query_len, context_len = int(plan.query_lens[index]), int(plan.context_lens[index])
            assert len(tenant.writes) == context_len - query_len, "a position is skipped or redone"
            for position in range(context_len - query_len, context_len):
                if index < plan.num_decode_rows:
                    assert tenant.last_position == position, "decoded token is not the last one"
                    assert tenant.last_token is not None
                    token = tenant.last_token
                else:
                    token = next(prefill)
                self._num_writes += 1
                entry = Entry(token, plan.weights_version, self._num_writes)
                place = self._place(tenant, position)
                assert place not in written, "two rows write one slot"
                written.add(place)
                self._blocks[place[0]][place[1]] = entry
                tenant.writes.append(entry)
        assert next(prefill, None) is None
        contexts: list[list[Entry]] = []
        for index, row in enumerate(rows):
            context = self._read(self._tenants[row], int(plan.context_lens[index]))
            first = len(context) - int(plan.query_lens[index])
            contexts.extend(context[: first + 1 + i] for i in range(int(plan.query_lens[index])))
        assert len(contexts) == starts[-1]
        return contexts

    def _output(self, plan: StepPlan, contexts: list[list[Entry]]) -> StepOutput:
        token_ids, attended = [], []
        compute_row = np.repeat(plan.rows, plan.query_lens).tolist()
        columns = (plan.sample_sources, plan.sample_rows, plan.sample_positions)
        for source, row, position in zip(*(c.tolist() for c in columns), strict=True):
            tenant, context = self._tenants[row], contexts[source]
            if compute_row[source] != row:
                assert not tenant.writes, "a child of a fork has KV of its own"
                tenant.writes = list(self._tenants[compute_row[source]].writes)
            assert tenant.new_row is not None, f"row {row} samples without parameters"
            assert position == len(context) == len(tenant.writes)
            token = next_token([entry.token for entry in context], tenant.new_row.seed, position)
            tenant.last_token, tenant.last_position = token, position
            token_ids.append(token)
            attended.append([entry.version for entry in context])
        self.ran[plan.step_id] = Ran(plan, attended)
        scores = [
            token_score([entry.token for entry in contexts[source]], target)
            for source, target in zip(
                plan.score_sources.tolist(), plan.score_targets.tolist(), strict=True
            )
        ]
        return StepOutput(
            samples=SampleResult(
                token_ids_S=np.array(token_ids, dtype=np.int64),
                is_finite_S=np.array([t not in self._poison for t in token_ids], dtype=np.bool_),
            ),
            scores=ScoreResult(logprobs_P=np.array(scores, dtype=np.float32)) if scores else None,
        )

    def _place(self, tenant: Tenant, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.block_size)
        assert index in tenant.table, "the row's block table is incomplete"
        return tenant.table[index], offset

    def _read(self, tenant: Tenant, length: int) -> list[Entry]:
        """The context as it lies in the blocks; the row must have written or inherited it."""
        places = [self._place(tenant, position) for position in range(length)]
        found = [self._blocks[block][offset] for block, offset in places]
        assert found == tenant.writes[:length], "someone else wrote into this row's blocks"
        return tenant.writes[:length]
