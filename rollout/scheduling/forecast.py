"""MemoryForecast: whether one more request fits, given how long outputs are expected to get."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rollout.blocks.block_manager import BlockManager
from rollout.scheduling.sequence import Sequence

Floats = NDArray[np.float64]

_DECAY_AFTER_STOPS = 1024
# Few outputs say little: each block counts this many more outputs that stop at the overall rate.
# The blocks beyond all that were seen stop at the rate of the later half of them, smoothed alike.
_SMOOTHING, _TAIL_SMOOTHING = 1.0, 8.0
_LARGEST_HAZARD = 1.0 - 1e-9
# What preempted sequences held stays in reserve, at most this part of the pool, less by this
# fraction with each step.
_LARGEST_RESERVE, _RESERVE_DECAY = 0.25, 1 / 512


class OutputLengthEstimator:
    """Learns how long outputs get, in blocks, from those that ended and those that have not yet.

    Each output block has a hazard: of the outputs that began it, the fraction that stopped in it.
    Outputs that still run, and those cut off by their limit, count as begun and not stopped, so
    long ones are not forgotten for ending last. Counts are halved now and then, since a policy's
    lengths drift as it is trained. Source: the product-limit estimator (Kaplan and Meier 1958).
    """

    def __init__(self) -> None:
        self._num_begun = np.zeros(64)
        self._num_stopped = np.zeros(64)
        self._stops_until_decay = _DECAY_AFTER_STOPS
        self._cumulative: Floats | None = None  # hazard before each block; None: counts changed
        self._tail_hazard = 0.0  # of blocks beyond those seen

    def begin(self, start: int, end: int) -> None:
        """An output began its blocks [start, end)."""
        if end > len(self._num_begun):
            num_more = max(end, 2 * len(self._num_begun)) - len(self._num_begun)
            self._num_begun = np.pad(self._num_begun, (0, num_more))
            self._num_stopped = np.pad(self._num_stopped, (0, num_more))
        self._num_begun[start:end] += 1
        self._cumulative = None

    def stop(self, block: int) -> None:
        """An output stopped by itself in its block `block`, which it had begun."""
        self._num_stopped[block] += 1
        self._stops_until_decay -= 1
        if not self._stops_until_decay:
            self._num_begun /= 2
            self._num_stopped /= 2
            self._stops_until_decay = _DECAY_AFTER_STOPS
        self._cumulative = None

    def last_blocks(self, current: Floats, limits: Floats, draws: Floats) -> Floats:
        """The block in which each output will stop: [num_outputs], from `current` to `limits`.

        An output's draw from the unit exponential distribution picks the quantile of its remaining
        length, so that many outputs together are spread as they will be. As long as none has
        stopped by itself, all go to their limits.
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
    """Foresees the largest number of blocks that the sequences in context will hold at once.

    Each takes a block for every `block_size` tokens and frees its own at its end, so the most are
    held just before one of the ends. Blocks of a shared prefix count once. A preemption shows that
    this fell short: what the victim held is kept in reserve for a while.

    `conservativeness` 1 counts what is expected, less counts that part of all growth and reserve;
    0 admits whatever has room to begin.
    Source: the future required memory of Past-Future scheduling (Gong et al. 2025, LightLLM).
    """

    def __init__(self, blocks: BlockManager, *, conservativeness: float = 1.0) -> None:
        self.lengths = OutputLengthEstimator()
        self._blocks = blocks
        self._conservativeness = conservativeness
        self._num_reserved = 0.0
        # Of the sequences in context, in this step, once it is needed: blocks of its own that each
        # holds, and how many it is going to take.
        self._own: tuple[Floats, Floats] | None = None
        self._num_untaken = 0  # counted as held, but taken from the pool in the next step only

    def start_step(self) -> None:
        """Forget what was foreseen in the step before."""
        self._own, self._num_untaken = None, 0
        self._num_reserved *= 1.0 - _RESERVE_DECAY

    def observe_preemption(self, num_blocks: int) -> None:
        """A sequence had to give its blocks back, since the pool ran out."""
        limit = _LARGEST_RESERVE * self._blocks.num_blocks
        num_wanted = self._num_reserved + self._conservativeness * num_blocks
        self._num_reserved = min(num_wanted, limit)

    @property
    def has_begun(self) -> bool:
        """Whether the sequences in context have been looked at in this step."""
        return self._own is not None

    def num_missing(
        self, in_context: list[Sequence], candidate: Sequence, *, num_own: int, takes_later: bool
    ) -> int:
        """How many blocks the pool would lack at its fullest if `candidate` ran as well.

        It has its shared blocks, and takes `num_own` more to begin with, at once or, if
        `takes_later`, in the next step. If none is missing, it counts as in context from now on.
        """
        now, growth = self._own or self._own_blocks(in_context)
        self._own = now, growth
        shared = candidate.num_shared_blocks
        first = np.array([[num_own + shared], [candidate.num_prompt_blocks]], dtype=np.float64)
        limit, draw = np.array([[candidate.max_blocks], [candidate.length_draw]])
        now = np.append(now, float(num_own))
        growth = np.append(growth, self._growth(first[0], first[1], limit, draw))
        num_untaken = self._num_untaken + num_own
        # Blocks that no sequence counts as its own: shared ones whose first user has left, and
        # those of plans in flight.
        num_others = self._blocks.num_used_blocks + num_untaken - now.sum()
        longest_first = np.argsort(-growth, kind="stable")
        # Before the end of the i-th of these, it and those before it are left, each grown as much.
        rounds = growth[longest_first]
        held = np.cumsum(now[longest_first]) + rounds * np.arange(1, len(rounds) + 1)
        num_available = self._blocks.num_blocks - self._num_reserved
        num_missing = math.ceil(float(held.max()) + float(num_others) - num_available)
        if num_missing > 0:
            return num_missing
        self._own = now, growth
        if takes_later:
            self._num_untaken = num_untaken
        return 0

    def _own_blocks(self, sequences: list[Sequence]) -> tuple[Floats, Floats]:
        table = np.array(
            [
                (
                    len(s.blocks),
                    s.num_shared_blocks,
                    s.num_prompt_blocks,
                    s.max_blocks,
                    s.length_draw,
                )
                for s in sequences
            ],
            dtype=np.float64,
        )
        held, shared, prompt, limit, draw = table.T
        return held - shared, self._growth(held, prompt, limit, draw)

    def _growth(self, held: Floats, prompt: Floats, limit: Floats, draw: Floats) -> Floats:
        """Blocks that each is going to take beyond those it holds."""
        last = self.lengths.last_blocks(held - prompt, limit - prompt, draw)
        growth: Floats = self._conservativeness * (prompt + last - held)
        return growth
