"""RolloutGroup: the finished samples of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.requests.dynamic_request import DynamicInferenceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All samples of one submitted prompt, in sample order; failed ones are among them."""

    group_id: int
    requests: list[DynamicInferenceRequest]
