"""Complete programs: training loops on the engine, and what a user brings to `rollout train`.

People run and copy them. Tests and some benchmarks import them.
"""
