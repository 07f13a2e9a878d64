"""The command line: `rollout serve`, `generate`, `bench`, `explain` and `top`."""
