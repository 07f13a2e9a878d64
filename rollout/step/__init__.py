"""The contract between brain and muscle: a plan of integers goes down, sampled tokens come back."""
