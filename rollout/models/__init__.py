"""Decoder language models for inference, and their way from and to Hugging Face checkpoints."""

from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoints.loading import build_model, save_hf_directory
from rollout.models.spec import ModelSpec

__all__ = ["CausalLM", "ModelSpec", "build_model", "save_hf_directory"]
