"""Prompts of a training loop: sources, chat format, checks, curricula, and the ledger of prompts.

Used by users' training loops and by `producer`, `evaluation`, `environments`, `rewards` and `train`
of `trainer_hooks`.
"""
