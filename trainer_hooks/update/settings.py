"""Settings of an update: the reference policy, and the limit on skipped steps.

Used by `trainer_hooks.update.reference`, `trainer_hooks.update.guarded_step`,
`trainer_hooks.update.micro_batches` and `trainer_hooks.train.job`. The module imports no torch, so
that mistakes in a job's config are reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rollout.errors import ConfigError
from rollout.keyword_hints import refuses_with_hints
from rollout.ranges import Interval, PositiveFraction, PositiveInt, check_fields

MaxSkippedSteps = Annotated[int, Interval(1, 1_000_000)]
DEFAULT_MAX_SKIPPED_STEPS = 5

# Keywords of TRL, and the names of the same settings here.
REFERENCE_HINTS = {
    "sync_ref_model": "set by sync_interval",
    "ref_model_sync_steps": "sync_interval",
    "ref_model_mixup_alpha": "sync_weight",
}


@refuses_with_hints(REFERENCE_HINTS, ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    """Settings for a reference that follows the policy.

    `sync_interval`: number of training steps between two moves towards the policy. None means that
    the reference does not move. TRL: `ref_model_sync_steps`.
    `sync_weight`: share of the policy's weights in a move. 1 copies them. With `sync_interval=1`, a
    small share makes the reference an exponential moving average. TRL: `ref_model_mixup_alpha`.
    Raises ConfigError for a value out of range.
    """

    sync_interval: PositiveInt | None = None
    sync_weight: PositiveFraction = 1.0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.sync_interval is None and self.sync_weight != 1.0:
            raise ConfigError(
                f"sync_weight={self.sync_weight} without sync_interval, with which the reference "
                "stays as it is; set sync_interval, or leave sync_weight out"
            )
