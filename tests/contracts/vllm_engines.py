"""Engines over vLLM for tests, where vLLM is installed: `make test-vllm`."""

from __future__ import annotations

import os
from contextlib import nullcontext
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout import InferenceConfig, LoraAdapter
from rollout.engine.engine import Engine
from rollout.models.plain_tensors import named_weights
from tests.lora_adapters import merged, random_adapter
from tests.tiny_models import MAX_LENGTH, tiny_model

HAS_VLLM = find_spec("vllm") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_BLOCKS, BLOCK_SIZE = 24, 32  # vLLM's attention on a CPU takes blocks of 32, 64, ... tokens
# The heads that vLLM's attention on a CPU takes.
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}

# What the config of each family has besides SHAPE.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"std": 0.4},
    "mistral": {"sliding_window": 24},
    "gemma3_text": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    # vLLM's latent attention on a CPU takes 512 + 64 values, and scaled RoPE alone is right there.
    "deepseek_v3": {
        "num_key_value_heads": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.3,
            "mscale_all_dim": 0.7,
        },
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "position_embedding_type": "rope",
    },
    "falcon_h1": {
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_ssm": 128,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
}

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
    return tiny_model(family, seed=seed, **SHAPE | FAMILIES[family])


@cache
def directory_of(family: str = "qwen3") -> Path:
    """A directory with the model of seed 0."""
    directory = Path(mkdtemp(prefix="rollout-vllm-test-"))
    vllm_model(family).save_pretrained(directory)
    return directory


def vllm_weights(seed: int, family: str = "qwen3") -> dict[str, Tensor]:
    weights = named_weights(vllm_model(family, seed))
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def vllm_adapter(seed: int) -> LoraAdapter:
    """A random adapter of all linear layers of the model."""
    return random_adapter(vllm_weights(0), seed=seed)


@cache
def adapted_model(seed: int, adapter_seed: int | None, family: str = "qwen3") -> Any:
    """The model of `seed`, with the adapter of `adapter_seed` merged in."""
    if adapter_seed is None:
        return vllm_model(family, seed)
    model = deepcopy(vllm_model(family, seed))
    model.load_state_dict(
        merged(vllm_weights(seed, family), vllm_adapter(adapter_seed)), strict=False
    )
    return model


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


def allow_async_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM schedule asynchronously on a CPU, which it switches off there.

    A step runs when it is launched, and its result is read after the launch of the next one.
    """
    if DEVICE != "cpu":
        return
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        is_async = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_async

    def none(*_: Any, **__: Any) -> None: ...

    def stream_or_event(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(record=none, synchronize=none, wait_stream=none)

    checked = classmethod(check_and_update_config)
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", checked)
    for name in ("Event", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, stream_or_event)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
