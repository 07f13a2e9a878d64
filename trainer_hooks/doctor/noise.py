"""How far two right computations of one log-prob may differ: rounding, measured and bounded.

Shape letter: N tokens.

The error of a sum of n products in a precision with unit roundoff u grows as sqrt(n) u if it is
summed one after another, and as sqrt(log2 n) u if it is summed in blocks, as matrix libraries do
(Higham and Mary 2019, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput.
41(5), sec. 2-3; Blanchard, Higham and Mary 2020, sec. 3, for blocks). What the trainer's model
really loses is measured: the same tokens in the engine's dtype and in float64. An engine that sums
in another order has an independent error, sqrt(n / log2 n) times as large at most; both add up to
sqrt(1 + n / log2 n) times the measured one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer_hooks.doctor.tokens import ExaminedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """What rounding explains, in nats. `noise_rms`: the measured error of one computation.

    `rms`, `largest`: bounds on the root mean square and on the largest of N differences.
    """

    noise_rms: float
    rms: float
    largest: float

    def covers(self, gap_N: Tensor) -> bool:
        """Whether rounding explains all of the gap."""
        if not len(gap_N):
            return True
        return rms_of(gap_N) <= self.rms and float(gap_N.abs().max()) <= self.largest


def rms_of(values_N: Tensor) -> float:
    """Root mean square; 0 of nothing."""
    return math.sqrt(float(values_N.double().square().mean())) if len(values_N) else 0.0


def tolerance_of(noise_N: Tensor, largest_logprob: float, longest_sum: int) -> Tolerance:
    """The bounds that follow from the measured errors `noise_N` and the longest sum.

    The largest of N Gaussian differences is sqrt(2 ln 2N) times their deviation; errors with longer
    tails show in the largest one that was measured. A log-prob is handed over in float32.
    """
    factor = math.sqrt(1.0 + longest_sum / math.log2(max(longest_sum, 2)))
    handed_over = torch.finfo(torch.float32).eps * max(1.0, largest_logprob)
    noise = math.hypot(rms_of(noise_N), handed_over)
    gaussian = noise * math.sqrt(2.0 * math.log(2.0 * max(len(noise_N), 1)))
    largest = max(gaussian, float(noise_N.abs().max()) if len(noise_N) else 0.0)
    return Tolerance(noise_rms=noise, rms=factor * noise, largest=factor * largest)


def longest_sum_of(model: nn.Module, tokens: ExaminedTokens) -> int:
    """The most products that one number of a pass is the sum of."""
    widths = [m.in_features for m in model.modules() if isinstance(m, nn.Linear)]
    return max([*widths, *(len(row) for row in tokens.rows)])
