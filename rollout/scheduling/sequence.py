"""Sequence: the running state of one request.

`rollout.scheduling.scheduler` creates it. Scheduler, RequestQueue, RunningRequests, MemoryForecast
and PlannedStep write it, and `rollout.scheduling.integrity` checks it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter

from rollout.blocks.kv_cache_manager import BlockTable
from rollout.sampling_params import SamplingParams
from rollout.scheduling.stopping import StopRule
from rollout.version_spans import VersionSpans

order_of, request_id_of = attrgetter("order"), attrgetter("request_id")


class Phase(Enum):
    """Phase of a sequence. A PAUSED sequence keeps its row and blocks, and waits for free
    blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """The running state of one request.

    Counts include the plans in flight, but `tokens` and `kv_spans` include only committed steps.

    order: (-priority, arrival). The smallest order runs first, and the largest is preempted first.
    num_prompt: length of the original prompt, before any checkpoint.
    num_prompt_blocks: number of blocks for the original prompt.
    max_blocks: number of blocks for all tokens that may be computed.
    assumed_blocks: `max_blocks`, or fewer if the request sets no length limit.
    length_draw: determines the expected output length; see `rollout.scheduling.forecast`.
    num_output_blocks: blocks of output that the forecast has counted.
    num_computed: positions whose KV is written.
    num_cached: positions found in the prefix index when the request began to run.
    num_tokens: prompt and sampled tokens; tokens after the first len(tokens) are still on the
        device.
    num_entered: number of tokens when the request entered this engine.
    num_in_flight: number of plans in flight that compute or sample the sequence.
    num_blocks_sent: number of leading blocks of the table that plans have sent to the device.
    writable_end: end of the positions that can be written, because no other sequence holds their
        blocks.
    is_on_device: whether the sequence decodes: its last token was sampled in its row.
    is_new_row: whether no plan has contained the row's sampling parameters yet.
    kv_spans: the version that wrote the KV of each committed position. The request's record shares
        this object while it grows; `restart` replaces it.
    """

    request_id: int
    order: tuple[int, int]
    group_id: int | None
    tokens: array[int]
    num_prompt: int
    sampling_params: SamplingParams
    seed: int
    stop_rule: StopRule
    wants_prompt_logprobs: bool
    num_prompt_blocks: int
    max_blocks: int
    assumed_blocks: int
    length_draw: float

    phase: Phase = Phase.WAITING
    table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    num_cached: int = 0
    num_tokens: int = 0
    num_entered: int = 0
    num_in_flight: int = 0
    num_output_blocks: int = 0
    num_blocks_sent: int = 0
    writable_end: int = 0
    max_length: int = 0
    is_on_device: bool = False
    is_new_row: bool = False
    kv_spans: VersionSpans = field(default_factory=VersionSpans)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_entered = len(self.tokens)
        self.max_length = self.stop_rule.max_length

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens that have no KV yet; 1 for a sequence that decodes."""
        return self.num_tokens - self.num_computed

    @property
    def is_fresh(self) -> bool:
        """Whether no sampled token has been committed yet."""
        return len(self.tokens) == self.num_prompt

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log-probs are wanted and not computed yet."""
        return self.wants_prompt_logprobs and self.num_tokens == self.num_entered

    def restart(self) -> None:
        """Reset all running state except the tokens, which are computed again from position 0."""
        self.phase = Phase.WAITING
        self.num_blocks_sent = self.num_computed = self.writable_end = 0
        self.num_tokens = len(self.tokens)
        self.is_on_device = False
        self.kv_spans = VersionSpans()
