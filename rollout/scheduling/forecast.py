"""MemoryForecast: predicts whether one more request fits into the KV pool.

The prediction uses the expected lengths of outputs. `rollout.scheduling.scheduler` creates it and
asks it before a request is admitted or forked. RunningRequests of `rollout.scheduling.queues`
reports which sequences start, grow, end and are preempted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rollout.blocks.kv_cache_manager import KVCacheManager
from rollout.scheduling.sequence import Sequence

Floats = NDArray[np.float64]

_DECAY_AFTER_STOPS = 1024
# A rate from few outputs is uncertain. So each block counts _SMOOTHING additional outputs, which
# stop at the overall rate. Beyond all blocks seen, outputs stop at the rate of the later half of
# the seen blocks, to which _TAIL_SMOOTHING outputs are added in the same way.
_SMOOTHING, _TAIL_SMOOTHING = 1.0, 8.0
_LARGEST_HAZARD = 1.0 - 1e-9
# Largest part of the pool that is kept in reserve after preemptions, and the fraction by which the
# reserve shrinks with each step.
_LARGEST_RESERVE, _RESERVE_DECAY = 0.25, 1 / 512
# Length assumed for an output without its own limit until a first output has stopped. A model's
# maximum length is often far longer than its outputs.
ASSUMED_OUTPUT_TOKENS = 2048
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def length_draw(arrival: int) -> float:
    """Return the length draw of request number `arrival`, a value of the unit exponential
    distribution. Draws are not random: the draws of many requests fill the distribution evenly.
    `OutputLengthEstimator.last_blocks` derives a request's expected length from its draw."""
    return -math.log1p(-((arrival + 0.5) * _GOLDEN_RATIO % 1.0))


class OutputLengthEstimator:
    """Estimates the lengths of outputs, in blocks, from ended and running outputs.

    Each output block has a hazard: of the outputs that began the block, the fraction that stopped
    in it. Running outputs, and outputs that their limit cut off, count as begun and not stopped.
    Without them, long outputs, which end last, are underestimated. The counts are halved after
    every 1024 stops, because a policy's lengths change in training.
    Source: the product-limit estimator (Kaplan and Meier 1958).
    """

    def __init__(self) -> None:
        self._num_begun = np.zeros(64)
        self._num_stopped = np.zeros(64)
        self._stops_until_decay = _DECAY_AFTER_STOPS
        self._cumulative: Floats | None = None  # hazard before each block; None if counts changed
        self._tail_hazard = 0.0  # hazard of each block beyond the blocks seen

    @property
    def has_stops(self) -> bool:
        """Whether any output has stopped before its limit."""
        self._cumulative_hazard()
        return self._tail_hazard > 0

    def begin(self, start: int, end: int) -> None:
        """Record that an output has begun its blocks [start, end)."""
        if end > len(self._num_begun):
            num_more = max(end, 2 * len(self._num_begun)) - len(self._num_begun)
            self._num_begun = np.pad(self._num_begun, (0, num_more))
            self._num_stopped = np.pad(self._num_stopped, (0, num_more))
        self._num_begun[start:end] += 1
        self._cumulative = None

    def stop(self, block: int) -> None:
        """Record that an output has stopped before its limit, in block `block`, which it had
        begun."""
        self._num_stopped[block] += 1
        self._stops_until_decay -= 1
        if not self._stops_until_decay:
            self._num_begun /= 2
            self._num_stopped /= 2
            self._stops_until_decay = _DECAY_AFTER_STOPS
        self._cumulative = None

    def last_blocks(self, current: Floats, limits: Floats, draws: Floats) -> Floats:
        """Return the output block in which each output is expected to stop.

        All arrays are [num_outputs]. Results lie between `current` and `limits`. `draws` come from
        `length_draw`, and each selects a quantile of the output's remaining length. So many outputs
        together have the expected distribution of lengths. Until a first output has stopped, all
        outputs are expected to reach their limits.
        """
        cumulative = self._cumulative_hazard()
        if not self._tail_hazard:
            return limits
        last_known = len(cumulative) - 1
        past_known = np.maximum(current - last_known, 0.0) * self._tail_hazard
        reached = cumulative[np.minimum(current, last_known).astype(np.int64)] + past_known
        wanted = reached + draws
        within = np.searchsorted(cumulative, wanted, side="right") - 1.0
        beyond = last_known + np.floor((wanted - cumulative[-1]) / self._tail_hazard)
        stops = np.where(wanted < cumulative[-1], within, beyond)
        last: Floats = np.clip(stops, current, limits)
        return last

    def _cumulative_hazard(self) -> Floats:
        if self._cumulative is None:
            num_known = int(np.count_nonzero(self._num_begun))
            begun, stopped = self._num_begun[:num_known], self._num_stopped[:num_known]
            overall = float(stopped.sum() / begun.sum()) if num_known else 0.0
            later = slice(num_known // 2, None)
            num_later = begun[later].sum() + _TAIL_SMOOTHING
            self._tail_hazard = float(
                (stopped[later].sum() + _TAIL_SMOOTHING * overall) / num_later
            )
            hazard = (stopped + _SMOOTHING * overall) / (begun + _SMOOTHING)
            steps = -np.log1p(-np.minimum(hazard, _LARGEST_HAZARD))
            self._cumulative = np.concatenate(([0.0], np.cumsum(steps)))
        return self._cumulative


class MemoryForecast:
    """Predicts the largest number of blocks that the running sequences will hold at once.

    A sequence takes a block for every `block_size` tokens and frees its blocks when it ends, so the
    pool is fullest just before a sequence ends. Blocks of a shared prefix count once. A preemption
    shows that the forecast was too low. The number of blocks that the preempted sequence held is
    then kept in reserve for a while.

    `conservativeness` is the fraction of the expected growth and of the reserve that is counted. At
    0 a request is admitted if there is room for its present tokens.
    Source: the future required memory of Past-Future scheduling (Gong et al. 2025, LightLLM).
    """

    def __init__(self, kv_cache_manager: KVCacheManager, *, conservativeness: float = 1.0) -> None:
        self._kv = kv_cache_manager
        self._lengths = OutputLengthEstimator()
        self._conservativeness = conservativeness
        self._num_reserved = 0.0
        self._num_blocks_at_limits = 0  # needed if every running sequence reached its limit
        # For each running sequence: the number of blocks that it alone holds, and the number of
        # further blocks that it is expected to take. Computed at most once a step.
        self._own: tuple[Floats, Floats] | None = None
        self._num_untaken = 0  # counted as held, and taken from the pool in the next step

    # ---- events

    def start_step(self) -> None:
        """Discard the forecast of the last step, and shrink the reserve."""
        self._own, self._num_untaken = None, 0
        self._num_reserved *= 1.0 - _RESERVE_DECAY

    def add(self, sequence: Sequence) -> None:
        """Count a sequence that begins to run."""
        self._num_blocks_at_limits += sequence.max_blocks
        self.observe_length(sequence)

    def remove(self, sequence: Sequence, *, has_stopped: bool = False) -> None:
        """Stop counting a sequence. `has_stopped` is whether it ended with finish reason "stop"."""
        self._num_blocks_at_limits -= sequence.max_blocks
        if has_stopped:
            self._lengths.stop(sequence.num_output_blocks - 1)

    def observe_length(self, sequence: Sequence) -> None:
        """Record the output blocks that the sequence has begun. Changes
        `Sequence.num_output_blocks`."""
        num_begun = len(sequence.table.blocks) - sequence.num_prompt_blocks + 1
        if num_begun > sequence.num_output_blocks:
            self._lengths.begin(sequence.num_output_blocks, num_begun)
            sequence.num_output_blocks = num_begun

    def observe_preemption(self, num_blocks: int) -> None:
        """Record that a sequence lost `num_blocks` blocks because no block was free."""
        limit = _LARGEST_RESERVE * self._kv.num_blocks
        num_wanted = self._num_reserved + self._conservativeness * num_blocks
        self._num_reserved = min(num_wanted, limit)

    # ---- the forecast

    def num_missing_blocks(
        self,
        running: Iterable[Sequence],
        candidate: Sequence,
        num_own: int,
        *,
        takes_later: bool = False,
    ) -> int:
        """Return how many blocks are missing to run `candidate` beside `running`; 0 if it fits.

        The candidate takes `num_own` blocks at once, or in the next step if `takes_later`. It fits
        if the pool holds the expected lengths of all sequences. If `running` is empty, it needs
        only its `num_own` blocks.

        If 0 is returned, the caller must start the candidate, because this step's forecast now
        includes it.
        """
        num_short = num_own - self._kv.num_free_blocks
        if num_short > 0:
            return num_short
        runs_alone = not self._num_blocks_at_limits
        at_limits = self._num_blocks_at_limits + candidate.max_blocks
        if runs_alone or (at_limits <= self._kv.num_blocks and self._own is None):
            return 0
        return self._num_missing(running, candidate, num_own, takes_later=takes_later)

    def _num_missing(
        self, running: Iterable[Sequence], candidate: Sequence, num_own: int, *, takes_later: bool
    ) -> int:
        """Return how many blocks the pool lacks when it is fullest, if `candidate` runs as well. If
        0 is returned, the candidate is added to this step's forecast."""
        now, growth = self._own or self._own_blocks(running)
        self._own = now, growth
        shared = candidate.table.num_shared
        first = np.array([[num_own + shared], [candidate.num_prompt_blocks]], dtype=np.float64)
        limit, assumed, draw = np.array(
            [[candidate.max_blocks], [candidate.assumed_blocks], [candidate.length_draw]]
        )
        now = np.append(now, float(num_own))
        growth = np.append(growth, self._growth(first[0], first[1], limit, assumed, draw))
        num_untaken = self._num_untaken + num_own
        # Blocks that no sequence counts as its own: shared blocks whose first user has left, and
        # blocks of plans in flight.
        num_others = self._kv.num_used_blocks + num_untaken - now.sum()
        longest_first = np.argsort(-growth, kind="stable")
        # Just before sequence i ends, sequences 0 .. i are left. Each has grown as much as i has.
        rounds = growth[longest_first]
        held = np.cumsum(now[longest_first]) + rounds * np.arange(1, len(rounds) + 1)
        num_available = self._kv.num_blocks - self._num_reserved
        num_missing = math.ceil(float(held.max()) + float(num_others) - num_available)
        if num_missing > 0:
            return num_missing
        self._own = now, growth
        if takes_later:
            self._num_untaken = num_untaken
        return 0

    def _own_blocks(self, sequences: Iterable[Sequence]) -> tuple[Floats, Floats]:
        columns = np.array(
            [
                (
                    len(s.table.blocks),
                    s.table.num_shared,
                    s.num_prompt_blocks,
                    s.max_blocks,
                    s.assumed_blocks,
                    s.length_draw,
                )
                for s in sequences
            ],
            dtype=np.float64,
        )
        held, shared, prompt, limit, assumed, draw = columns.T
        return held - shared, self._growth(held, prompt, limit, assumed, draw)

    def _growth(
        self, held: Floats, prompt: Floats, limit: Floats, assumed: Floats, draw: Floats
    ) -> Floats:
        """Return how many further blocks each sequence is expected to take, [num_sequences]."""
        if not self._lengths.has_stops:
            limit = np.maximum(assumed, held)
        last = self._lengths.last_blocks(held - prompt, limit - prompt, draw)
        growth: Floats = self._conservativeness * (prompt + last - held)
        return growth
