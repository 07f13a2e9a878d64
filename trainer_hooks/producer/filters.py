"""Group filters: decide which finished groups are trained on.

Used by `trainer_hooks.producer.producer` and `trainer_hooks.producer.group_pool`, which calls the
filters and replaces filtered groups. Users pass RewardRangeFilter or functions of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout.errors import ConfigError
from rollout.ranges import AnyNumber, check_fields
from trainer_hooks.producer.groups import ScoredGroup
from trainer_hooks.prompts.history import PromptHistory

# A filter returns the reason for leaving a group out, a word that becomes part of a metric's name,
# or None to train on the group. The history of the group's prompt does not yet contain the group.
GroupFilter = Callable[[ScoredGroup, PromptHistory], str | None]


def zero_variance(group: ScoredGroup, history: PromptHistory) -> str | None:
    """Return "zero_variance" for a group whose rewards are all equal, else None.

    Source: DAPO, "dynamic sampling" (Yu et al. 2025), arXiv 2503.14476, sec. 3.2.
    """
    return None if group.has_spread else "zero_variance"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRangeFilter:
    """Filters groups whose mean reward is below `low` (too_hard) or above `high` (too_easy).

    A limit of None is not checked. Raises ConfigError unless `low` is below `high`.
    """

    low: AnyNumber | None = None
    high: AnyNumber | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ConfigError(f"RewardRangeFilter: low={self.low} must be below high={self.high}")

    def __call__(self, group: ScoredGroup, history: PromptHistory) -> str | None:
        """Return "too_hard", "too_easy", or None for a mean reward within the limits."""
        if self.low is not None and group.mean_reward < self.low:
            return "too_hard"
        if self.high is not None and group.mean_reward > self.high:
            return "too_easy"
        return None
