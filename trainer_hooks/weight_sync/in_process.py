"""Weights of a trainer that lives in the engine's process."""

from __future__ import annotations

from trainer_hooks.weight_sync.llm_sync import LLMWeightSync


class InProcessWeightSync(LLMWeightSync):
    """Hands the trainer's live tensors to the engine of an LLM, which copies them in place."""
