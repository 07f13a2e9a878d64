"""Decoder language models for inference, read from and written to Hugging Face checkpoints."""

from rollout.models.causal_lm import CausalLM as CausalLM
from rollout.models.checkpoints.loading import build_model as build_model
from rollout.models.checkpoints.loading import save_hf_directory as save_hf_directory
from rollout.models.spec import ModelSpec as ModelSpec

__all__: list[str]
