"""Prompts of a training job: data sources, chat format, checks, the ledger of issued prompts,
curricula.
"""
