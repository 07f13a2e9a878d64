"""The `rollout` command: `main`, and a module for each subcommand."""
