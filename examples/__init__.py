"""Complete programs: training loops on the engine, and what a user brings to `rollout train`."""
