"""Weights of a trainer on the machine where engine processes run."""

from __future__ import annotations

from trainer_hooks.weight_sync.llm_sync import LLMWeightSync


class SharedMemoryWeightSync(LLMWeightSync):
    """Copies the tensors once into shared memory, from where all engines take them: all commit, or
    none does. For AsyncLLM, and LLM(use_coordinator=True). The last committed copy stays, for an
    engine that comes late.
    """
