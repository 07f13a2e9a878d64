"""Engines over vLLM for tests, where vLLM is installed: `make test-vllm`."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

from rollout import InferenceConfig
from rollout.engine.engine import Engine
from rollout.models.plain_tensors import named_weights
from tests.tiny_models import MAX_LENGTH, tiny_model

HAS_VLLM = find_spec("vllm") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_BLOCKS, BLOCK_SIZE = 24, 32  # vLLM's attention on a CPU takes blocks of 32, 64, ... tokens
# The heads that vLLM's attention on a CPU takes.
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}

if HAS_VLLM:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


@cache
def vllm_model(family: str = "qwen3", seed: int = 0) -> Any:
    return tiny_model(family, seed=seed, std=0.4, **SHAPE)


@cache
def directory_of(family: str = "qwen3") -> Path:
    """A directory with the model of seed 0."""
    directory = Path(mkdtemp(prefix="rollout-vllm-test-"))
    vllm_model(family).save_pretrained(directory)
    return directory


def vllm_weights(seed: int, family: str = "qwen3") -> dict[str, Tensor]:
    weights = named_weights(vllm_model(family, seed))
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def vllm_engine(family: str = "qwen3", num_blocks: int = NUM_BLOCKS, **config: Any) -> Engine:
    """An engine over vLLM, in float32, with `num_blocks` blocks."""
    from rollout_vllm.engine import make_engine

    options = {"num_gpu_blocks_override": num_blocks, **config.pop("engine_options", {})}
    fields: dict[str, Any] = {
        "max_sequence_length": MAX_LENGTH,
        "max_requests": 8,
        "block_size_tokens": BLOCK_SIZE,
        "dtype": "float32",
        "device": DEVICE,
        "seed": 0,
    }
    whole = InferenceConfig(engine="vllm", engine_options=options, **(fields | config))
    return make_engine(directory_of(family), whole)
