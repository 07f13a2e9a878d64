"""Settings of the policy losses, and the constants of each loss kind.

Used by the other modules of `trainer_hooks.losses`, by users' training loops and by
`trainer_hooks.train.job`. Settings are checked when they are made and never change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from rollout.errors import ConfigError
from rollout.keyword_hints import refuses_with_hints
from rollout.ranges import (
    Choices,
    Interval,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    check_fields,
)

AdvantageNormalization = Literal["std", "none"]
AdvantageBaseline = Literal["mean", "leave_one_out"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
CorrectionMode = Literal["auto", "none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
KLEstimator = Literal["k1", "k2", "k3"]
RatioLevel = Literal["token", "geometric", "sequence"]
_FRESH = "a fresh token weighs 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The constants that the paper of a loss kind fixes.

    `ratio_level`: `token` has a ratio of each token. `geometric` and `sequence` have one ratio of a
    rollout, the geometric mean or the product over its tokens.
    `epsilon_low`, `epsilon_high`: the clip range is [1 - epsilon_low, 1 + epsilon_high].
    `clips_weight`: True if the clipped ratio is a constant weight of log pi, without a gradient.
    `gate_temperatures`: temperatures of a sigmoid that replaces the clip, for A > 0 and for A <= 0.
    `advantage_normalization`, `advantage_baseline`: the paper's arguments of `group_advantages`.
    `divides_by_max_length`: True if token sums are divided by the limit on new tokens.
    """

    ratio_level: RatioLevel = "token"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    aggregation: Aggregation
    clips_weight: bool = False
    gate_temperatures: tuple[float, float] | None = None
    advantage_normalization: AdvantageNormalization = "std"
    advantage_baseline: AdvantageBaseline = "mean"
    divides_by_max_length: bool = False

    @property
    def clips_tokens(self) -> bool:
        """Whether the loss is PPO's objective, clipped token by token."""
        is_gated = self.gate_temperatures is not None
        return self.ratio_level == "token" and not self.clips_weight and not is_gated


KINDS = {
    # Shao et al. 2024, arXiv 2402.03300, eq. 3
    "grpo": Kind(aggregation="seq-mean-token-mean"),
    # Schulman et al. 2017, arXiv 1707.06347, eq. 7; its advantages come from a critic
    "ppo": Kind(aggregation="token-mean", advantage_normalization="none"),
    # Yu et al. 2025, arXiv 2503.14476, eq. 8
    "dapo": Kind(aggregation="token-mean", epsilon_high=0.28),
    # Liu et al. 2025, arXiv 2503.20783, sec. 3.2; the divisor is that of its code
    "dr_grpo": Kind(
        aggregation="seq-mean-token-sum", advantage_normalization="none", divides_by_max_length=True
    ),
    # Zheng et al. 2025, arXiv 2507.18071, eq. 5 to 7; the clip range of its sec. 5.1
    "gspo": Kind(
        ratio_level="geometric",
        epsilon_low=3e-4,
        epsilon_high=4e-4,
        aggregation="seq-mean-token-mean",
    ),
    # Chen et al. 2025 (MiniMax-M1), arXiv 2506.13585, eq. 4 and 5; a cap of 5, no lower bound
    "cispo": Kind(aggregation="token-mean", epsilon_low=1.0, epsilon_high=4.0, clips_weight=True),
    # Gao et al. 2025 (SAPO), arXiv 2511.20347; the temperatures are the defaults of TRL, too
    "sapo": Kind(
        aggregation="seq-mean-token-mean",
        epsilon_low=1.0,
        epsilon_high=math.inf,
        gate_temperatures=(1.0, 1.05),
    ),
    # Ahmadian et al. 2024, arXiv 2402.14740: a whole completion is one action
    "rloo": Kind(
        ratio_level="sequence",
        aggregation="seq-mean-token-mean",
        advantage_normalization="none",
        advantage_baseline="leave_one_out",
    ),
}
POLICY_LOSS_KINDS = tuple(KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyCorrection:
    """Constant token weights for rollouts of older policies, from w = proximal / behaviour.

    mode: truncate limits w to at most `high` and at least `low`. mask uses w inside [low, high] and
        0 outside. none uses 1. auto truncates per token at 2 if proximal log-probs are given, else
        uses 1.
    level: token has one w per token. sequence and geometric have one w per rollout: the product
        over its tokens, or their geometric mean.
    low: lower bound of w. None means 0 for truncate and 0.5 for mask.
    high: upper bound of w. None means 2 for truncate and 5 for mask.
    lag_decay: d > 0 raises both bounds to the power 1 / (1 + d * lag), with lag = policy lag + KV
        lag. The band narrows towards 1 as lag grows. A token without lag has the given bounds.
    max_kv_lag: tokens with a larger KV lag (sampler's version - mean version of its KV) weigh 0.
        None sets no limit.

    Raises ConfigError for a value out of range and for settings that contradict each other.
    """

    mode: CorrectionMode = "auto"
    level: CorrectionLevel = "token"
    low: Annotated[float, Interval(0.0, 1.0, unit=_FRESH)] | None = None
    high: Annotated[float, Interval(1.0, unit=_FRESH)] | None = None
    lag_decay: NonNegativeFloat = 0.0
    max_kv_lag: NonNegativeFloat | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        settings = (self.level, self.low, self.high, self.lag_decay, self.max_kv_lag)
        if self.mode in ("auto", "none") and settings != ("token", None, None, 0.0, None):
            raise ConfigError(
                f"mode={self.mode!r} takes no other settings of the correction; choose "
                "mode='truncate' or mode='mask', or leave the others out"
            )
        if self.lag_decay > 0.0 and self.level != "token":
            raise ConfigError(
                f"lag_decay={self.lag_decay} with level={self.level!r}: tokens of one rollout have "
                "different lags; choose level='token' or lag_decay=0"
            )

    @property
    def needs_proximal(self) -> bool:
        """Whether the weights need proximal log-probs."""
        return self.mode in ("truncate", "mask")

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds (low, high) of a token without lag."""
        default_low, default_high = (0.5, 5.0) if self.mode == "mask" else (0.0, 2.0)
        return (
            default_low if self.low is None else self.low,
            default_high if self.high is None else self.high,
        )


_CLIP = "epsilon_low and epsilon_high"
# Keywords of TRL, verl, OpenRLHF and slime, and the names of the same settings here.
LOSS_HINTS = {
    **dict.fromkeys(("loss_type", "loss_mode", "importance_sampling_level"), "kind"),
    **dict.fromkeys(("epsilon", "clip_range", "cliprange", "clip_ratio", "clip_eps"), _CLIP),
    **dict.fromkeys(("eps_clip", "clip_epsilon"), _CLIP),
    **dict.fromkeys(("clip_ratio_low", "eps_clip_low", "clip_eps_low"), "epsilon_low"),
    **dict.fromkeys(("clip_ratio_high", "eps_clip_high", "clip_eps_high"), "epsilon_high"),
    **dict.fromkeys(("delta", "clip_ratio_c", "eps_clip_c"), "dual_clip"),
    "loss_agg_mode": "aggregation",
    "loss_scale_factor": "max_completion_length",
    **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "init_kl_coef"), "kl_coefficient"),
    **dict.fromkeys(("kl_loss_type", "kl_penalty"), "kl_estimator"),
    **dict.fromkeys(("entropy_coef", "entropy_coeff", "ent_coef"), "entropy_coefficient"),
    "off_policy_mask_threshold": "max_sequence_kl",
    "vllm_importance_sampling_cap": "correction=OffPolicyCorrection(mode='truncate', high=...)",
    "tis_imp_ratio_cap": "correction=OffPolicyCorrection(mode='truncate', high=...)",
    "scale_rewards": "the argument normalize of group_advantages",
    "temperature": "UpdateSettings.temperature",
}


@refuses_with_hints(LOSS_HINTS, ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig:
    """Settings of the policy loss.

    kind: name of the loss. It sets the defaults of the other fields.
    epsilon_low: lower part of the clip range of the ratio, [1 - epsilon_low, 1 + epsilon_high].
        None means the value in the kind's paper.
    epsilon_high: upper part of the clip range. A larger value leaves room for unlikely tokens
        ("clip higher", DAPO, sec. 3.1). For cispo, 1 + epsilon_high is the cap on the importance
        weight. (In TRL, epsilon_high is that cap itself.) None means the value in the kind's paper.
    dual_clip: c > 1 bounds the loss of a token with A < 0 at -c A (Ye et al. 2020, arXiv
        1912.09729, eq. 5). Only for kinds that clip token by token. None sets no bound.
    aggregation: how token losses become one number, by verl's names. None means the aggregation in
        the kind's paper. cispo and sapo accept any aggregation. Each other kind accepts only its
        own.
    max_completion_length: constant by which token sums per rollout are divided (Dr. GRPO). None
        does not divide them.
    kl_coefficient: weight of the KL term to the reference policy. 0 leaves the term out.
    kl_estimator: estimator of the KL to the reference policy, explained in
        `trainer_hooks.losses.kl`.
    kl_importance_weighted: True weights the KL of a token by its ratio, as explained in
        `trainer_hooks.losses.kl`.
    entropy_coefficient: weight of the entropy bonus. 0 leaves the bonus out.
    max_sequence_kl: limit on a rollout's mean of log behaviour - log pi. In rollouts above it,
        tokens with A < 0 weigh 0 (off-policy sequence masking: DeepSeek-V3.2, arXiv 2512.02556,
        sec. 3.1). None sets no limit.
    correction: weights of tokens that an older policy sampled.

    Raises ConfigError for an unknown kind, a value out of range, and combinations that do not
    compute what their names say.
    """

    kind: Annotated[str, Choices(POLICY_LOSS_KINDS)] = "dapo"
    epsilon_low: PositiveFraction | None = None
    epsilon_high: PositiveFloat | None = None
    dual_clip: Annotated[float, Interval(1.0, is_low_open=True)] | None = None
    aggregation: Aggregation | None = None
    max_completion_length: PositiveInt | None = None
    kl_coefficient: NonNegativeFloat = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_importance_weighted: bool = False
    entropy_coefficient: NonNegativeFloat = 0.0
    max_sequence_kl: PositiveFloat | None = None
    correction: OffPolicyCorrection = field(default_factory=OffPolicyCorrection)

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        self._check_combinations()

    def _check_combinations(self) -> None:
        kind, aggregation = KINDS[self.kind], self.resolved_aggregation
        if self.dual_clip is not None:
            if not kind.clips_tokens:
                able = ", ".join(name for name in KINDS if KINDS[name].clips_tokens)
                raise ConfigError(
                    f"dual_clip={self.dual_clip} with kind={self.kind!r}, which does not clip "
                    f"token by token; leave it out, or choose one of {able}"
                )
            if not 1.0 + self.clip_range[1] < self.dual_clip < math.inf:
                raise ConfigError(
                    f"dual_clip={self.dual_clip} must be above 1 + epsilon_high = "
                    f"{1.0 + self.clip_range[1]}; 3 is customary"
                )
        if kind.ratio_level != "token" and aggregation != kind.aggregation:
            raise ConfigError(
                f"aggregation={aggregation!r} would weigh the one ratio that kind={self.kind!r} "
                f"has per rollout by its length; leave it out ({kind.aggregation})"
            )
        if kind.clips_tokens and aggregation != kind.aggregation:
            clipping = [name for name in KINDS if KINDS[name].clips_tokens]
            others = [repr(name) for name in clipping if KINDS[name].aggregation == aggregation]
            raise ConfigError(
                f"aggregation={aggregation!r} with kind={self.kind!r}, which is named for "
                f"{kind.aggregation!r}; leave it out, or choose kind={' or '.join(others)}"
            )
        if kind.clips_weight and self.clip_range[0] < 1.0:
            raise ConfigError(
                f"epsilon_low={self.epsilon_low} with kind={self.kind!r}, which caps importance "
                "weights and puts no floor under them; leave it out"
            )
        if kind.gate_temperatures and (self.epsilon_low or self.epsilon_high):
            raise ConfigError(
                f"epsilon_low={self.epsilon_low} and epsilon_high={self.epsilon_high} with kind="
                f"{self.kind!r}, which has a sigmoid in place of the clip; leave them out"
            )
        if self.max_completion_length is not None and aggregation != "seq-mean-token-sum":
            raise ConfigError(
                f"max_completion_length={self.max_completion_length} with aggregation="
                f"{aggregation!r}, which does not use it; choose kind='dr_grpo' or "
                "aggregation='seq-mean-token-sum'"
            )
        is_plain_k1 = self.kl_estimator == "k1" and not self.kl_importance_weighted
        if self.kl_coefficient > 0.0 and is_plain_k1:
            raise ConfigError(
                "kl_estimator='k1' as a loss has a gradient whose mean is zero and penalises "
                "nothing; choose 'k2', set kl_importance_weighted=True, or put it into the "
                "reward (token_rewards)"
            )

    def advantages(
        self,
        normalize: AdvantageNormalization | None = None,
        baseline: AdvantageBaseline | None = None,
    ) -> tuple[AdvantageNormalization, AdvantageBaseline]:
        """Return `normalize` and `baseline` for `group_advantages`, by default the kind's values.

        Raises ConfigError for values that contradict the kind.
        """
        kind = KINDS[self.kind]
        normalize = normalize or kind.advantage_normalization
        baseline = baseline or kind.advantage_baseline
        if self.kind == "dr_grpo" and normalize != "none":
            raise ConfigError(
                f"kind='dr_grpo' with advantage_normalization={normalize!r}: Dr. GRPO does not "
                "divide by the deviation; choose advantage_normalization='none', or kind='grpo'"
            )
        if self.kind == "rloo" and baseline != "leave_one_out":
            raise ConfigError(
                f"kind='rloo' with advantage_baseline={baseline!r}; choose "
                "advantage_baseline='leave_one_out', or another kind"
            )
        return normalize, baseline

    def with_limit(self, max_new_tokens: int) -> PolicyLossConfig:
        """Return the config with max_completion_length set to `max_new_tokens`.

        Returns this config if the kind has no such divisor, or if max_completion_length is set.
        """
        if not KINDS[self.kind].divides_by_max_length or self.max_completion_length is not None:
            return self
        return replace(self, max_completion_length=max_new_tokens)

    @property
    def clip_range(self) -> tuple[float, float]:
        """The epsilon_low and epsilon_high in effect."""
        kind = KINDS[self.kind]
        return (
            kind.epsilon_low if self.epsilon_low is None else self.epsilon_low,
            kind.epsilon_high if self.epsilon_high is None else self.epsilon_high,
        )

    @property
    def resolved_aggregation(self) -> Aggregation:
        """The aggregation in effect."""
        return self.aggregation or KINDS[self.kind].aggregation
