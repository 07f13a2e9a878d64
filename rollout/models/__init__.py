"""Decoder language models for inference, read from and written to Hugging Face checkpoints.

The names below are public; programs and benchmarks import them from here."""

from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoints.loading import build_model, save_hf_directory
from rollout.models.spec import ModelSpec

__all__ = ["CausalLM", "ModelSpec", "build_model", "save_hf_directory"]
