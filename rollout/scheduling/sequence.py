"""Sequence: the running state of one request. Only the scheduler writes it, and it never leaves
this package.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from rollout.scheduling.stopping import StopRule
from rollout.step.plan import RowSampling
from rollout.version_spans import VersionSpans


class Phase(Enum):
    """Where a sequence is: in the queue, holding a row and running, holding a row but out of
    blocks, gone.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Counts are *planned*: they include the plans in flight. `tokens` holds committed tokens only.

    num_computed    positions whose KV is written
    num_tokens      prompt and sampled tokens; those beyond len(tokens) are still on the device
    num_prompt      length of the original prompt, before any checkpoint
    kv_spans        committed: the version that wrote each position's KV. The request's document
                    reads the same object while it grows; `restart` leaves that one as it is.
    """

    request_id: int
    order: tuple[int, int]  # (-priority, arrival): smaller runs first, larger is evicted first
    group_id: int | None
    tokens: array[int]
    num_prompt: int
    sampling: RowSampling
    stop_rule: StopRule
    wants_prompt_logprobs: bool

    phase: Phase = Phase.WAITING
    row: int = 0
    blocks: list[int] = field(default_factory=list)
    num_blocks_sent: int = 0
    num_computed: int = 0
    num_tokens: int = 0
    num_in_flight: int = 0
    is_on_device: bool = False  # the last token was sampled in this row
    is_new_row: bool = False  # the row's sampling parameters are not sent yet
    kv_spans: VersionSpans = field(default_factory=VersionSpans)
    indexed_keys: list[bytes] = field(default_factory=list)  # of the first blocks, in the index
    is_indexable: bool = True  # False once a block could not be indexed

    def __post_init__(self) -> None:
        self.num_tokens = len(self.tokens)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that have no KV yet; 1 for a sequence that decodes."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.is_on_device and self.num_uncomputed == 1

    @property
    def is_fresh(self) -> bool:
        """Nothing of it has been sampled and committed yet."""
        return len(self.tokens) == self.num_prompt

    @property
    def is_full(self) -> bool:
        """Nothing more may be planned: the token in flight is its last."""
        return self.num_tokens >= self.stop_rule.max_length

    @property
    def scores_prompt(self) -> bool:
        """The prompt's log-probs are wanted, and not had yet."""
        return self.wants_prompt_logprobs and self.num_tokens == self.num_prompt

    def restart(self) -> None:
        """Forget all running state; the tokens are kept and computed again from position 0."""
        self.phase = Phase.WAITING
        self.row, self.num_blocks_sent, self.num_computed = 0, 0, 0
        self.num_tokens = len(self.tokens)
        self.is_on_device = False
        self.kv_spans = VersionSpans()
        self.indexed_keys, self.is_indexable = [], True

    def note_shared(self, spans: VersionSpans) -> None:
        """The next positions' KV is there already, in a shared block."""
        self.kv_spans.extend(spans)
        self.num_computed += len(spans)

    def adopt_context(self, parent: Sequence) -> None:
        """A fork's KV is its parent's."""
        self.kv_spans = parent.kv_spans.copy()
        self.indexed_keys, self.is_indexable = list(parent.indexed_keys), parent.is_indexable
