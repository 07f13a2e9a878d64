"""TrainingBatch: the batch that a producer returns to the trainer, and its metrics.

Used by `trainer_hooks.producer.producer` and `trainer_hooks.producer.group_pool`, and read by
training loops. Nothing here has side effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.errors import RolloutError
from trainer_hooks.collate import RolloutBatch
from trainer_hooks.metrics.measure import rollout_metrics
from trainer_hooks.producer.groups import ScoredGroup
from trainer_hooks.prompts.ledger import PromptItem
from trainer_hooks.rewards import reward_metrics
from trainer_hooks.rollouts import Rollout


class ProducerError(RolloutError):
    """Raised by AsyncRolloutProducer if it can make no batch.

    Causes: the staleness bound allows no more groups, too many groups were replaced, a task was
    cancelled from outside, or the producer is not running.
    """


# Fates of groups while a batch was made. Each is part of a metric's name.
_FATES = (
    "aborted",
    "failed",
    "reward_failed",  # failed in scoring, and also counted as failed
    "filtered",
    "stale",
    "error",
    "retried",
    "refilled",
)
# Prefix of a group filter's reason in the counts of a pool and in the names of metrics.
FILTERED_PREFIX = "filtered/"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingBatch:
    """One batch of scored groups, as objects and as tensors.

    `index`: number of batches that the producer returned before this one.
    `rollouts`: tensors of all rollouts, in the order of `groups`, `group_size` rollouts per group.
    `version`: weights version at which the trainer trains on the batch.
    `admitted_at_version`: version at which the batch was begun. In ready order, it is the oldest
    version that sampled a token of the batch.
    `metrics`: `rollout_metrics` and counts and times of the batch's groups, for MetricsLogger.
    """

    index: int
    groups: Sequence[ScoredGroup]
    rollouts: RolloutBatch
    group_size: int
    version: int
    admitted_at_version: int
    metrics: dict[str, float]

    @property
    def items(self) -> list[PromptItem]:
        """The prompts, one per group."""
        return [group.item for group in self.groups]

    def __len__(self) -> int:
        """Number of groups."""
        return len(self.groups)


def mean_lag(rollouts: RolloutBatch) -> float:
    """Return the mean policy lag + KV lag of trained tokens, in versions, or 0 without tokens."""
    lag_BT = rollouts.policy_lag_BT + rollouts.kv_lag_BT
    return float(lag_BT[rollouts.mask_BT].mean()) if bool(rollouts.mask_BT.any()) else 0.0


def _state_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.state.items():
            if isinstance(value, (int, float)):
                values.setdefault(name, []).append(float(value))
    return {f"environment/{name}": sum(own) / len(own) for name, own in values.items()}


def batch_metrics(
    groups: Sequence[ScoredGroup],
    rollouts: RolloutBatch,
    counts: Counter[str],
    *,
    waited_s: float,
    num_waiting_batches: int,
) -> dict[str, float]:
    """Return the metrics of a batch: rollouts, reward terms, times in seconds, group counts.

    `counts`: number of groups by fate.
    `waited_s`: seconds that the trainer waited for the batch.
    `num_waiting_batches`: number of complete batches that remain.
    """
    group_size = len(groups[0].rewards)
    sampled = [rollout for group in groups for rollout in group.rollouts]
    finish_reasons = [rollout.finish_reason for rollout in sampled]
    faults = Counter(rollout.failure for rollout in sampled if rollout.failure is not None)
    generate_s = [group.generate_s for group in groups]
    reward_s = [group.reward_s for group in groups]
    num_valid = sum(len(group.valid_rewards) for group in groups)
    return {
        **rollout_metrics(rollouts, group_size, finish_reasons=finish_reasons),
        "timing_s/batch_wait": waited_s,
        "timing_s/group_generate_mean": sum(generate_s) / len(groups),
        "timing_s/group_generate_max": max(generate_s),
        "timing_s/group_reward_mean": sum(reward_s) / len(groups),
        "timing_s/group_reward_max": max(reward_s),
        "rollouts/num_groups": len(groups),
        "rollouts/num_reissued_groups": sum(group.num_reissues > 0 for group in groups),
        "rollouts/num_failed_samples": len(sampled) - num_valid,
        **{f"rollouts/num_failures/{kind}": n for kind, n in faults.items()},
        **reward_metrics([reward for group in groups for reward in group.rewards]),
        **_state_means(sampled),
        "rollouts/num_waiting_batches": num_waiting_batches,
        **{f"rollouts/num_{fate}_groups": counts[fate] for fate in _FATES},
        **{
            f"rollouts/{name}": count
            for name, count in counts.items()
            if name.startswith(FILTERED_PREFIX)
        },
    }
