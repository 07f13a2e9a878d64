"""The web page at `/`, which shows a server's engines, running samples and finished samples.

Used by `rollout.serve.app` and `rollout.serve.server`. `rollout.cli.top` shows the same snapshots.
"""
