"""The staleness bound: a number of versions, or a bound that follows the effective sample size.

Used by `trainer_hooks.producer.producer`, which reports the sample size of each batch to it. Users
construct EssBound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rollout.errors import ConfigError
from rollout.ranges import Interval, NonNegativeInt, PositiveFraction, PositiveInt, check_fields

_STATE = ("versions", "ess", "variance_per_version", "num_calm_batches")


_BetweenZeroAndOne = Annotated[float, Interval(0.0, 1.0, is_low_open=True, is_high_open=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EssBound:
    """Settings of a bound that follows the effective sample size (ESS) of the trained batches.

    ESS = (sum w)^2 / (n sum w^2) of w = trained policy / behaviour policy, in (0, 1]. Where ESS
    collapses, training on old rollouts collapses too (Huang et al. 2026, Stable asynchrony, arXiv
    2602.17616).

    Each update adds a step of about equal size to log w, so the variance of log w grows linearly
    with the lag L, as r L. A log-normal w of mean 1 then gives ESS = 1 / E[w^2] = exp(-r L). A
    batch of mean lag L shows r = -ln(ESS) / L. This r counts all of the variance as due to lag. If
    all tokens are as old as a bound S allows, ESS is exp(-r S).

    `least_ess`: the bound is lowered at once to the largest S with exp(-r S) >= least_ess. The
    default is where sequential Monte Carlo resamples (Doucet and Johansen 2009, A tutorial on
    particle filtering and smoothing, sec. 3.5).
    `raising_ess`: the bound grows by 1 after `patience` successive batches with exp(-r (S + 1)) >=
    raising_ess. The default is sqrt(least_ess), half of the variance that least_ess allows. After a
    rise, r must double before the bound falls again, so noise does not move the bound.
    `smoothing`: weight of the newest r in its running mean.
    `least`, `most`: limits of the bound. A bound of 0 tries 1 again after `patience` batches,
    because without lag r cannot be measured. The default of `most` is as far as Fu et al. 2025
    (AReaL, arXiv 2505.24298, sec. 7.3) trained without loss.
    Raises ConfigError unless least <= most and least_ess < raising_ess.
    """

    least: NonNegativeInt = 1
    most: NonNegativeInt = 8
    least_ess: _BetweenZeroAndOne = 0.5
    raising_ess: _BetweenZeroAndOne = 0.5**0.5
    patience: PositiveInt = 3
    smoothing: PositiveFraction = 0.5

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.least > self.most:
            raise ConfigError(f"least={self.least} and most={self.most} must be 0 <= least <= most")
        if not self.least_ess < self.raising_ess:
            raise ConfigError(
                f"least_ess={self.least_ess} and raising_ess={self.raising_ess} must be 0 < "
                "least_ess < raising_ess < 1"
            )


class StalenessBound:
    """The bound in force, `versions`, and the measurements that it follows.

    A bound given as a number is constant.
    `ess`: last effective sample size, or None before the first.
    `variance_per_version`: the r of EssBound, or None before a batch with a lag.
    `num_calm_batches`: number of successive batches so far that allow raising the bound.
    Raises ConfigError for a number below 0 and for a text other than "ess".
    """

    def __init__(self, bound: int | Literal["ess"] | EssBound) -> None:
        if isinstance(bound, str):
            if bound != "ess":
                raise ConfigError(f"max_staleness_versions={bound!r} must be a number, or 'ess'")
            bound = EssBound()
        if isinstance(bound, int) and bound < 0:
            raise ConfigError(f"max_staleness_versions={bound} must be 0 or more")
        self._settings = bound if isinstance(bound, EssBound) else None
        self.versions = bound.least if isinstance(bound, EssBound) else bound
        self._mean_lag = 0.0
        self.ess: float | None = None
        self.variance_per_version: float | None = None
        self.num_calm_batches = 0

    def record_delivery(self, mean_lag: float) -> None:
        """Record that a batch was returned to the trainer.

        `mean_lag`: mean over its tokens of policy lag + KV lag, in versions.
        """
        self._mean_lag = mean_lag

    def observe(self, ess: float) -> int:
        """Record the ESS of the last returned batch, after training on it. Returns the new bound.

        Raises ConfigError for an ESS outside (0, 1].
        """
        if not 0.0 < ess <= 1.0 + 1e-6:
            raise ConfigError(f"effective sample size {ess} must be in (0, 1]")
        self.ess = min(ess, 1.0)
        settings = self._settings
        if settings is not None:
            self._measure(settings)
            self._follow(settings)
        return self.versions

    def _measure(self, settings: EssBound) -> None:
        assert self.ess is not None
        if self._mean_lag <= 0.0:
            return
        newest, before = -math.log(self.ess) / self._mean_lag, self.variance_per_version
        weight = 1.0 if before is None else settings.smoothing
        self.variance_per_version = weight * newest + (1.0 - weight) * (before or 0.0)

    def _follow(self, settings: EssBound) -> None:
        rate, bound = self.variance_per_version, self.versions
        if rate is not None and bound > 0 and rate * bound > -math.log(settings.least_ess):
            self.versions = max(int(-math.log(settings.least_ess) / rate), settings.least)
            self.num_calm_batches = 0
            return
        tries_again = bound == 0 and self._mean_lag <= 0.0
        has_room = rate is not None and rate * (bound + 1) <= -math.log(settings.raising_ess)
        self.num_calm_batches = self.num_calm_batches + 1 if has_room or tries_again else 0
        if self.num_calm_batches >= settings.patience:
            self.versions, self.num_calm_batches = min(bound + 1, settings.most), 0

    def metrics(self) -> dict[str, float]:
        """Return the bound in force and the last ESS, for MetricsLogger."""
        metrics: dict[str, float] = {"producer/max_staleness_versions": self.versions}
        return metrics if self.ess is None else {**metrics, "producer/ess": self.ess}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON under the key `staleness`, or {} for a constant bound."""
        if self._settings is None:
            return {}
        own = {name: getattr(self, name) for name in _STATE}
        return {"staleness": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, within the limits of the settings.

        Has no effect if this bound or the bound of the saved run is constant.
        """
        if self._settings is not None and "staleness" in state:
            for name in _STATE:
                setattr(self, name, state["staleness"][name])
            self.versions = min(max(self.versions, self._settings.least), self._settings.most)
