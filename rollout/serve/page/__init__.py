"""The page at `/`, which shows engines, throughput, staleness and the latest samples.

Used by `rollout.serve.app` and `rollout.serve.server`; `rollout.cli.top` shows the same snapshots.
"""
