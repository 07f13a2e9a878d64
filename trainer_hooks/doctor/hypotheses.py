"""Hypotheses about a gap between two log-probs of the same tokens, and how much each explains.

Used by `diagnosis` of `trainer_hooks.doctor`, which tests hypotheses, and by `alignment_causes`,
`sampling_causes` and `weight_causes`, which yield hypotheses.

Shape letters: N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from trainer_hooks.collate import RolloutBatch
from trainer_hooks.doctor.reference import Reference
from trainer_hooks.doctor.tokens import ExaminedTokens

Side = Literal["engine", "trainer"]
# What a hypothesis predicts: each log-prob, each log-prob by a fitted number, the size of the gap,
# or only the place of the gap.
Kind = Literal["values", "fit", "size", "place"]
# Deducted from a share when hypotheses are ranked: values are the most specific prediction.
_LESS_THAN_VALUES = {"values": 0.0, "place": 0.25, "size": 0.5, "fit": 0.5}
# A cause that explains less than half of the squared gap is not the main cause. A fitted number
# always explains something: a high temperature is halfway to the log-probs of any other weights.
_NEEDED_SHARE = {"values": 0.5, "fit": 0.99, "size": 0.5, "place": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Log-probs that one side computed, `claimed_N`, and the reference that they should equal.

    Tokens without a known reference are ignored.
    `batch`: the examined rows.
    `models`: float32 models by weights version.
    `tolerance`: the gap that rounding explains.
    `end_ids`: end tokens of requests that name none themselves.
    """

    side: Side
    tokens: ExaminedTokens
    batch: RolloutBatch
    claimed_N: Tensor
    reference: Reference
    models: dict[int, nn.Module]
    tolerance: Tolerance
    end_ids: Sequence[int]

    @property
    def gap_N(self) -> Tensor:
        """`claimed_N` minus the reference, or 0 for tokens whose reference is unknown."""
        gap_N = self.claimed_N - self.reference.stamped_N
        return gap_N.masked_fill(~self.reference.is_known_N, 0.0)

    @property
    def trainer_model(self) -> nn.Module:
        """The float32 model with the trained version's weights."""
        return self.models[self.tokens.train_version]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hypothesis:
    """One possible cause of a gap, with the finding's name, evidence and remedy if it is true.

    `predicted_N`: the log-probs that the cause implies, float64. None for a cause that adds noise.
    `noise_rms`, `noise_largest`: size of the gap, in nats, that a cause of noise implies.
    """

    name: str
    evidence: str
    remedy: str
    kind: Kind = "values"
    predicted_N: Tensor | None = None
    noise_rms: float = 0.0
    noise_largest: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """How much of a case's gap one hypothesis explains.

    `share`: explained part of the squared gap, at most 1. A negative share means a larger gap.
    `residual_rms`: root mean square of the rest of the gap, in nats.
    `is_whole`: True if rounding explains the rest of the gap.
    """

    name: str
    side: Side
    share: float
    residual_rms: float
    is_whole: bool
    kind: Kind
    evidence: str
    remedy: str

    @property
    def is_main_cause(self) -> bool:
        """Whether the hypothesis explains enough of the gap, for its kind, to be the main cause."""
        return self.is_whole or self.share >= _NEEDED_SHARE[self.kind]


def explain(case: Case, hypothesis: Hypothesis) -> Explanation:
    is_known_N, gap_N = case.reference.is_known_N, case.gap_N
    gap_rms = rms_of(gap_N[is_known_N])
    if hypothesis.predicted_N is None:
        share, residual_rms, is_whole = _explain_noise(case, hypothesis, gap_rms)
    else:
        left_N = (case.claimed_N - hypothesis.predicted_N)[is_known_N].nan_to_num(nan=torch.inf)
        residual_rms = rms_of(left_N)
        share = 1.0 - (residual_rms / gap_rms) ** 2
        is_whole = case.tolerance.covers(left_N)
    return Explanation(
        name=hypothesis.name,
        side=case.side,
        share=share,
        residual_rms=residual_rms,
        is_whole=is_whole,
        kind=hypothesis.kind,
        evidence=hypothesis.evidence,
        remedy=hypothesis.remedy,
    )


def _explain_noise(case: Case, hypothesis: Hypothesis, gap_rms: float) -> tuple[float, float, bool]:
    """Return `share`, `residual_rms` and `is_whole` of a hypothesis that predicts noise."""
    # The gap between two computations is `factor` times the noise of one computation. The share
    # stays below a half if the gap's size does not fit.
    factor = case.tolerance.rms / case.tolerance.noise_rms
    largest = float(case.gap_N.abs().max())
    if hypothesis.noise_rms <= case.tolerance.rms:
        return 0.0, gap_rms, False
    share = min(1.0, (factor * hypothesis.noise_rms / gap_rms) ** 2)
    too_large = max(0.0, gap_rms - factor * hypothesis.noise_rms)
    fits = share == 1.0 and largest <= factor * hypothesis.noise_largest
    return (share if fits else min(share, 0.49)), too_large, fits


def rank(explanations: Sequence[Explanation]) -> list[Explanation]:
    """Return the explanations, the best first."""

    # Values that leave only rounding come first, then main causes, then larger shares.
    def quality(tried: Explanation) -> tuple[bool, bool, float]:
        tells_values = tried.kind in ("values", "fit")
        share = tried.share - _LESS_THAN_VALUES[tried.kind]
        return tried.is_whole and tells_values, tried.is_main_cause, share

    return sorted(explanations, key=quality, reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The gap that rounding explains, in nats.

    `noise_rms`: measured rounding error of one computation.
    `rms`, `largest`: bounds on the root mean square and on the largest of N differences.
    """

    noise_rms: float
    rms: float
    largest: float

    def covers(self, gap_N: Tensor) -> bool:
        """Return whether rounding explains all of the gap."""
        if not len(gap_N):
            return True
        return rms_of(gap_N) <= self.rms and float(gap_N.abs().max()) <= self.largest


def rms_of(values_N: Tensor) -> float:
    """Return the root mean square, or 0 without values."""
    return math.sqrt(float(values_N.double().square().mean())) if len(values_N) else 0.0


def tolerance_of(noise_N: Tensor, largest_logprob: float, longest_sum: int) -> Tolerance:
    """Return the tolerance that follows from measured rounding errors.

    `noise_N`: the errors.
    `largest_logprob`: largest magnitude of a log-prob, for its rounding to float32.
    `longest_sum`: result of `longest_sum_of`.
    The largest of N Gaussian differences is sqrt(2 ln 2N) times their deviation. A larger measured
    error replaces this bound.
    """
    factor = math.sqrt(1.0 + longest_sum / math.log2(max(longest_sum, 2)))
    rounding = torch.finfo(torch.float32).eps * max(1.0, largest_logprob)
    noise = math.hypot(rms_of(noise_N), rounding)
    gaussian = noise * math.sqrt(2.0 * math.log(2.0 * max(len(noise_N), 1)))
    largest = max(gaussian, float(noise_N.abs().max()) if len(noise_N) else 0.0)
    return Tolerance(noise_rms=noise, rms=factor * noise, largest=factor * largest)


def longest_sum_of(model: nn.Module, tokens: ExaminedTokens) -> int:
    """Return the number of products in the longest sum of a pass, over inputs or positions."""
    widths = [m.in_features for m in model.modules() if isinstance(m, nn.Linear)]
    return max([*widths, *(len(row) for row in tokens.rows)])
