"""The two step axes of a run, and the axis over which each metric is drawn.

Used by the modules `console`, `jsonl`, `logger` and `wandb_run` of `trainer_hooks.metrics`, and by
the modules of `trainer_hooks.train` that write, read or draw metrics.
"""

TRAINER_STEP = "trainer/step"  # number of training steps done
ROLLOUT_VERSION = "rollout/version"  # version of the weights that generated

# Axis of the metrics whose names match a glob. A later glob overrides an earlier one, as in wandb.
AXIS_OF_METRIC = {
    "*": TRAINER_STEP,
    "engine/*": ROLLOUT_VERSION,
    "policy_staleness/*": ROLLOUT_VERSION,
    "kv_cache_staleness/*": ROLLOUT_VERSION,
    "kv_lag/*": ROLLOUT_VERSION,
}
