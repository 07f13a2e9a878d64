"""Prompts of a training loop: sources, chat format, checks, curricula, and the ledger of prompts.

Used by users' training loops, the producer, `evaluate` and `trainer_hooks.train`.
"""
