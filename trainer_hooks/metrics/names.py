"""The metrics by name, with the names that TRL, verl and Megatron-LM have for the same thing.

docs/metrics.md holds `markdown_table()`; a test compares them.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from trainer_hooks.metrics.axes import AXIS_OF_METRIC, TRAINER_STEP


@dataclass(frozen=True, slots=True)
class MetricName:
    """One metric, or a family of them with `*`; an empty name means that system has none."""

    name: str
    trl: str
    verl: str
    megatron: str
    unit: str
    meaning: str

    @property
    def axis(self) -> str:
        """What it is drawn over; the last glob that fits decides, as in a wandb run."""
        axis = TRAINER_STEP
        for glob, chosen in AXIS_OF_METRIC.items():
            if fnmatch.fnmatchcase(self.name, glob):
                axis = chosen
        return axis


_N = MetricName
METRIC_NAMES = (
    # rewards
    _N("reward", "reward", "critic/rewards/mean", "mean_reward", "reward", "mean over rollouts"),
    _N("reward_std", "reward_std", "", "", "reward", "deviation within a group, mean over groups"),
    _N("reward/min", "", "critic/rewards/min", "", "reward", "lowest"),
    _N("reward/max", "", "critic/rewards/max", "", "reward", "highest"),
    _N(
        "frac_reward_zero_std",
        "frac_reward_zero_std",
        "",
        "1 - nonzero_groups_ratio",
        "share",
        "groups whose rewards are all equal, which teach nothing",
    ),
    _N("rewards/*/mean", "rewards/*/mean", "", "", "reward", "of one function, unweighted"),
    _N("rewards/*/std", "rewards/*/std", "", "", "reward", "its deviation over the batch"),
    _N("failed_fraction", "", "response/aborted_ratio", "", "share", "rollouts that failed"),
    # completions
    _N(
        "completions/mean_length",
        "completions/mean_length",
        "response_length/mean",
        "mean_traj_length",
        "tokens",
        "generated, of rollouts that did not fail; tool output is not counted",
    ),
    _N(
        "completions/min_length",
        "completions/min_length",
        "response_length/min",
        "min_traj_length",
        "tokens",
        "shortest",
    ),
    _N(
        "completions/max_length",
        "completions/max_length",
        "response_length/max",
        "max_traj_length",
        "tokens",
        "longest",
    ),
    _N(
        "completions/clipped_ratio",
        "completions/clipped_ratio",
        "response_length/clip_ratio",
        "",
        "share",
        "cut by the length limit",
    ),
    _N(
        "completions/mean_terminated_length",
        "completions/mean_terminated_length",
        "",
        "",
        "tokens",
        "of those that ended themselves",
    ),
    _N(
        "completions/min_terminated_length",
        "completions/min_terminated_length",
        "",
        "",
        "tokens",
        "shortest of those",
    ),
    _N(
        "completions/max_terminated_length",
        "completions/max_terminated_length",
        "",
        "",
        "tokens",
        "longest of those",
    ),
    _N("completions/num_tokens", "", "", "", "tokens", "generated, of all rollouts of the step"),
    _N("prompts/num_tokens", "", "", "", "tokens", "of the prompts, once per rollout"),
    # rates
    _N(
        "completions/tokens_per_s",
        "rollout/generated_tok_s",
        "",
        "",
        "tokens/s",
        "generated; by the wall of the step, or of the generation phase where there is one",
    ),
    _N(
        "train/tokens_per_s",
        "perf/trained_tok_s_wall_clock",
        "perf/throughput",
        "",
        "tokens/s",
        "trained on, by the wall of the step",
    ),
    _N("engine/tokens_per_s", "", "", "", "tokens/s", "sampled by all engines together"),
    # staleness
    _N(
        "policy_staleness/mean",
        "sample/staleness_mean",
        "",
        "mean_policy_staleness",
        "versions",
        "age of the weights that sampled a token, over tokens trained on",
    ),
    _N(
        "policy_staleness/max",
        "sample/staleness_max",
        "",
        "max_policy_staleness",
        "versions",
        "oldest",
    ),
    _N("policy_staleness/stale_fraction", "", "", "", "share", "tokens of an older version"),
    _N(
        "policy_staleness/num_mixed_rollouts",
        "",
        "",
        "",
        "rollouts",
        "sampled by several versions: they went on through an update",
    ),
    _N("policy_staleness/hist/*", "", "", "", "tokens", "of age 0, 1, ...; `16+` for all above"),
    _N(
        "kv_cache_staleness/mean",
        "",
        "",
        "mean_kv_cache_staleness",
        "versions",
        "age of the weights that wrote a token's own KV entry",
    ),
    _N("kv_cache_staleness/max", "", "", "max_kv_cache_staleness", "versions", "oldest"),
    _N("kv_cache_staleness/hist/*", "", "", "", "tokens", "of age 0, 1, ..."),
    _N(
        "kv_lag/mean",
        "",
        "",
        "",
        "versions",
        "how much older than its sampler the KV was that a token attended to",
    ),
    _N("kv_lag/max", "", "", "", "versions", "largest"),
    _N("kv_lag/hist/*", "", "", "", "tokens", "of lag 0, 1, ..., rounded"),
    # the loss
    _N("entropy", "entropy", "actor/entropy", "", "nats", "of the policy per token, where given"),
    _N("train/loss", "loss", "actor/loss", "", "", "mean over minibatches"),
    _N("train/entropy", "entropy", "actor/entropy", "", "nats", "of the policy, from all logits"),
    _N("train/sampled_entropy", "", "", "", "nats", "mean of -log pi of the sampled tokens"),
    _N("train/kl", "kl", "actor/kl_loss", "", "nats", "to the reference policy"),
    _N("train/ppo_kl", "", "actor/ppo_kl", "", "nats", "from the policy clipped around, k1"),
    _N(
        "train/clip_ratio/region_mean",
        "clip_ratio/region_mean",
        "actor/pg_clipfrac",
        "",
        "share",
        "clipped tokens",
    ),
    _N("train/clip_ratio/*", "clip_ratio/*", "", "", "share", "below, for A < 0, and above"),
    _N("train/pg_clipfrac_lower", "", "actor/pg_clipfrac_lower", "", "share", "by `dual_clip`"),
    _N(
        "train/sampling/importance_sampling_ratio/*",
        "sampling/importance_sampling_ratio/*",
        "",
        "",
        "",
        "weights of the off-policy correction as applied, over tokens",
    ),
    _N("train/rollout_corr/*", "", "rollout_corr/*", "", "", "the gap it mends, tokens it drops"),
    _N("train/grad_norm", "grad_norm", "actor/grad_norm", "grad-norm", "", "before clipping"),
    _N("train/skipped_steps", "", "", "", "", "optimizer steps without a finite gradient"),
    _N("train/learning_rate", "learning_rate", "actor/lr", "learning-rate", "", "of the step"),
    # time
    _N("timing_s/step", "perf/step_s", "timing_s/step", "", "s", "wall of the step"),
    _N("timing_s/generate", "", "timing_s/gen", "", "s", "the trainer runs the engine"),
    _N("timing_s/wait", "perf/rollout_wait_s", "", "", "s", "for engines that run beside it"),
    _N("timing_s/suspend", "", "", "", "s", "pause and suspend"),
    _N("timing_s/update", "perf/weight_sync_s", "timing_s/update_weights", "", "s", "weights"),
    _N("timing_s/resume", "", "", "", "s", "resume and unpause"),
    _N("timing_s/train", "", "timing_s/update_actor", "", "s", "forward, backward, optimizer"),
    _N("timing_s/reward", "", "timing_s/reward", "", "s", "scoring"),
    _N("timing_s/checkpoint", "", "timing_s/save_checkpoint", "", "s", "saving"),
    _N("timing_s/evaluate", "", "timing_s/testing", "", "s", "evaluation"),
    _N("timing_s/other", "", "", "", "s", "whatever was not named"),
    _N("timing_share/*", "", "", "", "share", "each of the above of the step; they sum to 1"),
    # engines and producer
    _N("engine/busy_share", "", "", "", "share", "step seconds of the wall times the engines"),
    _N("engine/idle_share", "", "", "", "share", "the rest"),
    _N(
        "engine/*",
        "",
        "",
        "",
        "",
        "the fields of EngineStats; those of its ranks as sums, and of rank R of engine E as "
        "`engine/rank_E.R/*`",
    ),
    _N(
        "timing_s/batch_wait",
        "perf/rollout_wait_s",
        "",
        "",
        "s",
        "of one batch of the producer; beside the time account, not in it",
    ),
    _N("timing_s/group_*", "rollout/duration_s", "", "", "s", "of a group, beside the training"),
    _N(
        "rollouts/num_waiting_batches",
        "sample/rollout_queue_size",
        "",
        "",
        "batches",
        "finished, not yet trained on",
    ),
    _N(
        "rollouts/num_failures/*",
        "",
        "",
        "",
        "rollouts",
        "that a fault of their environment failed, by its kind",
    ),
    _N("rollouts/*", "", "", "", "", "the fates of groups and samples in the producer"),
    _N("producer/max_staleness_versions", "", "", "", "versions", "the bound in force"),
    _N(
        "producer/ess",
        "",
        "",
        "",
        "share",
        "effective sample size of a batch, as the trainer reported it last",
    ),
    _N("environment/*", "", "", "", "", "means of the numbers in the states of rollouts"),
    _N("eval/*", "", "val-core/*", "", "", "of held-out prompts"),
)


def markdown_table() -> str:
    """METRIC_NAMES as the table of docs/metrics.md."""
    header = ("ours", "TRL", "verl", "Megatron-LM", "unit", "axis", "meaning")
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for entry in METRIC_NAMES:
        names = [entry.name, entry.trl, entry.verl, entry.megatron]
        cells = [f"`{name}`" if name else "" for name in names]
        cells += [entry.unit, f"`{entry.axis}`", entry.meaning]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
