"""The `rollout` command: `main`, a module for each subcommand, and what several of them share."""
