"""Rollouts made beside the training that uses them, none older than a bound."""
