"""Prompts of a training job: data sources, chat format, the ledger of what was drawn, curricula."""
