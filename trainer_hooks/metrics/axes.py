"""The two step axes of a run, and the axis over which each metric is drawn.

Used by the wandb run, which declares the axes, by the JSONL file, which keeps rows up to a step,
and by the views of a run.
"""

TRAINER_STEP = "trainer/step"  # number of training steps done
ROLLOUT_VERSION = "rollout/version"  # version of the weights that generated

# Axis by glob of metric names. A later glob overrides an earlier one, as in wandb.
AXIS_OF_METRIC = {
    "*": TRAINER_STEP,
    "engine/*": ROLLOUT_VERSION,
    "policy_staleness/*": ROLLOUT_VERSION,
    "kv_cache_staleness/*": ROLLOUT_VERSION,
    "kv_lag/*": ROLLOUT_VERSION,
}
