"""The batch that the trainer gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.errors import RolloutError
from trainer_hooks.collate import RolloutBatch, TrainedLogprobs, collate_rollouts
from trainer_hooks.metrics.measure import rollout_metrics
from trainer_hooks.producer.groups import ScoredGroup
from trainer_hooks.prompts.ledger import PromptItem
from trainer_hooks.rewards import reward_metrics
from trainer_hooks.rollouts import Rollout


class ProducerError(RolloutError):
    """No batch can come: the bound forbids it, all prompts fail, or the producer is closed."""


# What became of prompts while a batch was made, under the names of its metrics.
_FATES = (
    "aborted",
    "failed",
    "reward_failed",  # those of the failed whose score failed
    "filtered",
    "stale",
    "error",
    "retried",
    "refilled",
)
# Before the reason of a group filter, in the counts of a pool and the names of metrics.
FILTERED_PREFIX = "filtered/"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingBatch:
    """`rollouts`: the tensors, group by group in the order of `groups`, `group_size` rollouts each.

    `index`: how many batches this producer handed over before. `version`: the weights version that
    it is to be trained at. `admitted_at_version`: the one at which it was begun; in ready order the
    oldest that sampled a token. `metrics`: flat, for MetricsLogger; those of `rollout_metrics`, and
    how the batch was made.
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


def collate_groups(
    groups: Sequence[ScoredGroup],
    version: int,
    temperature: float,
    pad_id: int,
    logprobs_mode: TrainedLogprobs,
    routing: bool,
) -> RolloutBatch:
    """The rollouts of all groups as one batch. Raises what collate_rollouts raises."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [reward for group in groups for reward in group.rewards]
    return collate_rollouts(rollouts, rewards, version, temperature, pad_id, logprobs_mode, routing)


def mean_lag(rollouts: RolloutBatch) -> float:
    """Updates between the KV that a trained token attended to and its trainer, on average."""
    lag_BT = rollouts.policy_lag_BT + rollouts.kv_lag_BT
    return float(lag_BT[rollouts.mask_BT].mean()) if bool(rollouts.mask_BT.any()) else 0.0


def _state_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """`environment/<name>`: the mean of each number in the states of the rollouts."""
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
    """Metrics of the rollouts and of the terms of their rewards, where the time of their batch
    went, in seconds, and what became of its prompts, in groups.

    `timing_s/batch_wait` is how long the trainer waited; generation and rewards ran beside it.
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
