"""The `rollout` command: `main`, a module for each subcommand, and modules that they share.

Run by users, as the script `rollout` and as `python -m rollout`.
"""
