"""create_backend: the one door to a device."""

from __future__ import annotations

import logging

import torch

from rollout.backends.base import Backend
from rollout.backends.cpu import MEMORY_KINDS, cpu_backend
from rollout.config import InferenceConfig, KVCacheManagementMode
from rollout.errors import ConfigError

logger = logging.getLogger(__name__)

_NO_EFFECT_ON_CPU = (
    "unified_memory_level",
    "num_cuda_graphs",
    "cuda_graph_mixed_prefill_count",
    "use_cuda_graphs_for_non_decode_steps",
    "use_flashinfer_fused_rope",
)


def create_backend(config: InferenceConfig) -> Backend:
    """The Backend that `config` asks for. Sets torch's thread count if `num_threads` is given.

    Raises ConfigError, naming field, value and remedy, for a device that is not there and for
    fields that the device cannot honour.
    """
    if config.device not in ("auto", "cpu"):
        raise ConfigError(
            f"device={config.device!r} is not available: only the CPU backend exists; "
            "use device='cpu' or 'auto'"
        )
    _refuse_without_effect(config)
    memory_kind = _memory_kind(config)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    backend = cpu_backend(memory_kind)
    logger.info(
        "backend: device=cpu, memory_kind=%s, threads=%d", memory_kind, torch.get_num_threads()
    )
    return backend


def _memory_kind(config: InferenceConfig) -> str:
    """The legal memory kind `config` names, or the one that "auto" stands for."""
    if config.memory_kind == "auto":
        keeps_bytes = config.kv_cache_management_mode is KVCacheManagementMode.PERSIST
        return "reserved" if config.static_kv_memory_pointers and not keeps_bytes else "device"
    if config.memory_kind not in MEMORY_KINDS:
        raise ConfigError(
            f"memory_kind={config.memory_kind!r} does not exist on CPU; "
            f"use 'auto' or one of {MEMORY_KINDS}"
        )
    return config.memory_kind


def _refuse_without_effect(config: InferenceConfig) -> None:
    if config.deterministic:
        raise ConfigError(
            "deterministic=True is not supported on CPU: matrix products of different batch sizes "
            "round differently; leave it False"
        )
    for name in _NO_EFFECT_ON_CPU:
        value, default = getattr(config, name), InferenceConfig.__dataclass_fields__[name].default
        if value != default:
            raise ConfigError(f"{name}={value!r} has no effect on CPU; leave it at {default!r}")
