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
    num_entered     tokens with which it entered this engine
    num_tokens      prompt and sampled tokens; those beyond len(tokens) are still on the device
    num_prompt      length of the original prompt, before any checkpoint
    num_in_flight   plans in flight that it has a part in
    writable_end    positions before this one can be written: their blocks are there, and its own
    kv_spans        committed: the version that wrote each position's KV. The request's document
                    reads the same object while it grows; `restart` leaves that one as it is.
    prefix_keys     of its first blocks, as far as they were looked up or indexed, under
                    `prefix_key_version`; the first `num_indexed_blocks` are in the index
    num_output_blocks, num_prompt_blocks, max_blocks, num_shared_blocks, length_draw: for the
                    forecast of its length; shared blocks are counted with whoever brought them
    """

    request_id: int
    order: tuple[int, int]  # (-priority, arrival): smaller runs first, larger is evicted first
    group_id: int | None
    tokens: array[int]
    num_prompt: int
    sampling: RowSampling
    stop_rule: StopRule
    wants_prompt_logprobs: bool
    num_prompt_blocks: int
    max_blocks: int  # at max_length
    length_draw: float

    phase: Phase = Phase.WAITING
    row: int = 0
    blocks: list[int] = field(default_factory=list)
    num_blocks_sent: int = 0
    num_computed: int = 0
    num_tokens: int = 0
    num_entered: int = 0
    num_in_flight: int = 0
    writable_end: int = 0
    is_on_device: bool = False  # it decodes: its last token was sampled in this row
    is_new_row: bool = False  # the row's sampling parameters are not sent yet
    kv_spans: VersionSpans = field(default_factory=VersionSpans)
    prefix_keys: list[bytes] = field(default_factory=list)
    prefix_key_version: int = 0
    num_indexed_blocks: int = 0
    is_indexable: bool = True  # False once a block could not be indexed

    num_output_blocks: int = 0  # those that the length estimator knows of
    num_shared_blocks: int = 0
    max_length: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = self.num_entered = len(self.tokens)
        self.max_length = self.stop_rule.max_length

    @property
    def num_uncomputed(self) -> int:
        """Tokens that have no KV yet; 1 for a sequence that decodes."""
        return self.num_tokens - self.num_computed

    @property
    def is_fresh(self) -> bool:
        """Nothing of it has been sampled and committed yet."""
        return len(self.tokens) == self.num_prompt

    @property
    def scores_prompt(self) -> bool:
        """The prompt's log-probs are wanted, and not had yet."""
        return self.wants_prompt_logprobs and self.num_tokens == self.num_entered

    def restart(self) -> None:
        """Forget all running state; the tokens are kept and computed again from position 0."""
        self.phase = Phase.WAITING
        self.row, self.num_blocks_sent, self.num_computed = 0, 0, 0
        self.num_tokens = len(self.tokens)
        self.writable_end = self.num_shared_blocks = 0
        self.is_on_device = False
        self.kv_spans = VersionSpans()
        self.num_indexed_blocks, self.is_indexable = 0, True

    def note_shared(self, spans: VersionSpans) -> None:
        """The next positions' KV is there already, in a shared block."""
        self.kv_spans.extend(spans)
        self.num_computed += len(spans)

    def adopt_context(self, parent: Sequence) -> None:
        """A fork's KV is its parent's."""
        self.kv_spans = parent.kv_spans.copy()

    def share_index(self, parent: Sequence) -> None:
        """The blocks of a fork are indexed as far as its parent's are."""
        self.prefix_keys = list(parent.prefix_keys)
        self.prefix_key_version = parent.prefix_key_version
        self.num_indexed_blocks = parent.num_indexed_blocks
        self.is_indexable = parent.is_indexable
