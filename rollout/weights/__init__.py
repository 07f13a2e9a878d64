"""Served weights and their updates: stage, vote, commit in place, or roll back."""
