"""Prompts of a training loop: sources, chat format, checks, curricula, and the ledger of prompts.

Its modules are used by users' training loops and in `trainer_hooks` by `producer`, `evaluation`,
`environments`, `rewards.scoring` and `train`.
"""
