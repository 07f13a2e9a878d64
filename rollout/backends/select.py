"""create_backend: chooses and creates the backend that a config asks for.

Used by `rollout.worker.loading` when it loads a model. `rollout.tensor_parallel.start`,
`rollout.apis.fleet_processes`, `trainer_hooks.train.threads` and benchmarks use the functions here
that read a config's device.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from rollout.backends.base import Backend
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cpu.forks import prepare_for_forks
from rollout.backends.devices import parse_device, require_device
from rollout.config import (
    DEFAULT_MAX_REQUESTS,
    DEFAULT_MAX_TOKENS,
    UNIFIED,
    InferenceConfig,
    KVCacheManagementMode,
)
from rollout.errors import ConfigError
from rollout.parallel.collectives import ONE_RANK, Collectives

logger = logging.getLogger(__name__)

DEFAULT_NUM_MIXED_GRAPHS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceRules:
    """Defaults and legal values of config fields on one kind of device.

    `block_size_tokens` is the default number of tokens of a KV block. `stable_kind` is the memory
    kind that keeps addresses over a suspend. The kind "auto" means `stable_kind` if suspends
    release the KV cache, and the device `prefers_stable` or the config asks for stable addresses.
    `fields_without_effect` has the config fields that must keep their defaults.
    """

    block_size_tokens: int
    memory_kinds: tuple[str, ...]
    stable_kind: str
    prefers_stable: bool
    fields_without_effect: tuple[str, ...]


_DEVICES = {
    "cpu": _DeviceRules(
        # Small, because samples of a group share only whole blocks of their prompt.
        block_size_tokens=64,
        memory_kinds=("device", "reserved"),
        stable_kind="reserved",
        prefers_stable=False,
        fields_without_effect=(
            "unified_memory_level",
            "num_cuda_graphs",
            "cuda_graph_mixed_prefill_count",
            "use_cuda_graphs_for_non_decode_steps",
            "use_flashinfer_fused_rope",
        ),
    ),
    "cuda": _DeviceRules(
        block_size_tokens=256,
        memory_kinds=("device", "vmm", "torch_memory_saver", UNIFIED),
        stable_kind="vmm",
        # Captured graphs then stay valid.
        prefers_stable=True,
        # The rotary embedding is always fused, by our own kernel.
        fields_without_effect=("use_flashinfer_fused_rope",),
    ),
}


def create_backend(config: InferenceConfig, collectives: Collectives = ONE_RANK) -> Backend:
    """Return the Backend that `config` asks for, for the rank whose `collectives` are given.

    Registers fork handlers, and sets torch's number of threads if `num_threads` is given. Raises
    ConfigError for a device that is not available and for fields that the device does not support.
    """
    device, index = require_device(config.device)
    _refuse_without_effect(config, device)
    memory_kind = _memory_kind(config, device)
    prepare_for_forks()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if device == "cpu":
        backend = cpu_backend(
            memory_kind, deterministic=config.deterministic, collectives=collectives
        )
    else:
        # Rank r uses device index + r; without an index each rank uses its current device.
        index = None if index is None else index + collectives.rank
        backend = _cuda_backend(config, index, memory_kind, collectives)
    logger.info(
        "backend: device=%s, memory_kind=%s, threads=%d",
        *(backend.device, memory_kind, torch.get_num_threads()),
    )
    return backend


def needs_gpu(config: InferenceConfig) -> bool:
    """Return whether each engine of `config` needs a GPU of its own. True for "cuda", and for
    "auto" if torch sees a GPU. False for a device with an index, which all engines share. The
    device need not be available here."""
    return parse_device(config.device) == ("cuda", None)


def block_size_of(config: InferenceConfig) -> int:
    """Return the number of tokens of a KV block, from `config` or the device's default. The device
    need not be available here. Raises ConfigError for an unknown device name, unless `config` has a
    block size."""
    if config.block_size_tokens is not None:
        return config.block_size_tokens
    kind, _ = parse_device(config.device)
    return _DEVICES[kind].block_size_tokens


def device_of(config: InferenceConfig) -> str:
    """Return "cpu" or "cuda". Raises ConfigError if the device is not available."""
    return require_device(config.device)[0]


def use_device(config: InferenceConfig, rank: int) -> None:
    """Make the GPU of this `rank` current in the calling thread. No-op on a CPU. Rank 0 uses the
    GPU that `config` names, by default GPU 0. Rank r uses the r-th GPU after it."""
    kind, index = require_device(config.device)
    if kind == "cuda":
        torch.cuda.set_device((index or 0) + rank)


def _cuda_backend(
    config: InferenceConfig, index: int | None, memory_kind: str, collectives: Collectives
) -> Backend:
    try:
        from rollout.backends.cuda.backend import cuda_backend
    except ImportError as error:
        raise ConfigError(
            f"device='cuda' needs Triton ({error}): pip install triton (extra 'gpu'), or use "
            "device='cpu'"
        ) from error
    num_graphs, max_mixed = config.num_cuda_graphs, config.cuda_graph_mixed_prefill_count
    max_mixed = DEFAULT_NUM_MIXED_GRAPHS if max_mixed is None else max_mixed
    return cuda_backend(
        memory_kind,
        index=index,
        num_graphs=num_graphs,
        max_mixed_graphs=max_mixed if config.use_cuda_graphs_for_non_decode_steps else 0,
        max_rows=min(
            config.max_requests or DEFAULT_MAX_REQUESTS, config.max_tokens or DEFAULT_MAX_TOKENS
        ),
        collectives=collectives,
    )


def _memory_kind(config: InferenceConfig, device: str) -> str:
    """Return the memory kind that `config` names, or the kind that "auto" means. Raises ConfigError
    for a kind that the device does not have."""
    rules, kind = _DEVICES[device], config.memory_kind
    if config.unified_memory_level:
        return UNIFIED
    if kind == "auto":
        keeps_bytes = config.kv_cache_management_mode is KVCacheManagementMode.PERSIST
        is_stable = config.static_kv_memory_pointers or rules.prefers_stable
        return rules.stable_kind if is_stable and not keeps_bytes else "device"
    if kind not in rules.memory_kinds:
        raise ConfigError(
            f"memory_kind={kind!r} does not exist on {device.upper()}; "
            f"use 'auto' or one of {rules.memory_kinds}"
        )
    return kind


def _refuse_without_effect(config: InferenceConfig, device: str) -> None:
    where = device.upper()
    if config.deterministic and device == "cuda":
        raise ConfigError(
            "deterministic=True is not supported on CUDA: matrix products of different batch "
            "sizes round differently; leave it False"
        )
    for name in _DEVICES[device].fields_without_effect:
        value, default = getattr(config, name), InferenceConfig.__dataclass_fields__[name].default
        if value != default:
            raise ConfigError(f"{name}={value!r} has no effect on {where}; leave it at {default!r}")
