"""Served weights and their updates: stage, verify, commit in place, or roll back."""
