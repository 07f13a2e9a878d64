"""The page at `/`, which shows engines, latencies, staleness, and samples while they run and after.

Used by `rollout.serve.app` and `rollout.serve.server`; `rollout.cli.top` shows the same snapshots.
"""
