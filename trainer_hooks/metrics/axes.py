"""The two step axes of a run: training steps, and versions of the weights that generated."""

TRAINER_STEP = "trainer/step"
ROLLOUT_VERSION = "rollout/version"

# Glob of metric names -> the axis they are drawn over; a later glob overrides an earlier one.
AXIS_OF_METRIC = {
    "*": TRAINER_STEP,
    "engine/*": ROLLOUT_VERSION,
    "policy_staleness/*": ROLLOUT_VERSION,
    "kv_cache_staleness/*": ROLLOUT_VERSION,
    "kv_lag/*": ROLLOUT_VERSION,
}
