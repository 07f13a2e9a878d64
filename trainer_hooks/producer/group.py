"""ScoredGroup: the samples of one prompt with their rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.requests import DynamicInferenceRequest
from trainer_hooks.prompt_ledger import PromptItem, PromptTicket
from trainer_hooks.rollouts import Rollout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredGroup:
    """In sample order. `rewards`: NaN for a failed rollout.

    `generate_s`, `reward_s`: seconds from the first request to the last, and for the rewards, of
    the attempt that succeeded.
    """

    ticket: PromptTicket
    item: PromptItem
    rollouts: Sequence[Rollout]
    rewards: Sequence[float]
    generate_s: float
    reward_s: float

    @property
    def requests(self) -> list[DynamicInferenceRequest]:
        """All requests, turns of a sample in order."""
        return [request for rollout in self.rollouts for request in rollout.requests]

    @property
    def valid_rewards(self) -> list[float]:
        return [reward for reward in self.rewards if not math.isnan(reward)]

    @property
    def has_spread(self) -> bool:
        """Two rewards differ, so that the group has a gradient."""
        return len(set(self.valid_rewards)) > 1

    def version_range(self) -> tuple[int, int] | None:
        """The oldest and the newest version that sampled a token; None if there is no token."""
        ranges = [
            (int(versions.min()), int(versions.max()))
            for rollout in self.rollouts
            if len(versions := rollout.policy_versions)
        ]
        if not ranges:
            return None
        return min(low for low, _ in ranges), max(high for _, high in ranges)
