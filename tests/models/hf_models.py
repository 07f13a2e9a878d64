"""Tiny random transformers models of every supported family, and their logits."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

VOCAB_SIZE = 97
PROMPT = tuple((7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(40))

CONFIG_CLASSES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def hf_config(family: str, **changes: Any) -> Any:
    """A transformers config with 2 layers of width 64."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    # transformers writes into the rope dict it is given.
    return CONFIG_CLASSES[family](**(sizes | deepcopy(changes)))


def hf_model(family: str, **changes: Any) -> Any:
    """A random model whose biases and norms are random too, so that ignoring one shows."""
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(family, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(mean, 0.2, generator=generator)
    return model


@torch.no_grad()
def hf_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Logits of every token, [T, V] float32."""
    logits: Tensor = model(torch.tensor([list(token_ids)])).logits
    return logits[0].float()
