"""Group filters: which finished groups are trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout.errors import ConfigError
from rollout.ranges import AnyNumber, check_fields
from trainer_hooks.producer.groups import ScoredGroup
from trainer_hooks.prompts.history import PromptHistory

# Says why a group is not to be trained on, in a word that names a metric, or None to train on it.
# The history is that of its prompt, without this group.
GroupFilter = Callable[[ScoredGroup, PromptHistory], str | None]


def zero_variance(group: ScoredGroup, history: PromptHistory) -> str | None:
    """Filters groups whose rewards are all equal, which give no gradient.

    Source: DAPO, "dynamic sampling" (Yu et al. 2025), arXiv 2503.14476, sec. 3.2.
    """
    return None if group.has_spread else "zero_variance"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRangeFilter:
    """Filters groups whose mean reward is below `low` (too_hard) or above `high` (too_easy).

    None is no bound. Raises ConfigError for bounds that leave nothing between them.
    """

    low: AnyNumber | None = None
    high: AnyNumber | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ConfigError(f"low={self.low} must be below high={self.high}")

    def __call__(self, group: ScoredGroup, history: PromptHistory) -> str | None:
        """The reason, or None for a group within the bounds."""
        if self.low is not None and group.mean_reward < self.low:
            return "too_hard"
        if self.high is not None and group.mean_reward > self.high:
            return "too_easy"
        return None
