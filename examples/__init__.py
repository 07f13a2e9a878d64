"""Complete programs: training loops on the engine, and what a user brings to `rollout train`.

People run and copy them. Tests, `benchmarks.staleness_bound` and `benchmarks.trl_step` import them.
"""
