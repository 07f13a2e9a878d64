"""The contract between scheduler and executor: a plan of integers goes down, tokens come back."""
