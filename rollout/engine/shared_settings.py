"""The settings that all engines of a fleet must share, so that a reply does not depend on the
engine that gives it. Weights are compared by checksum; speed and memory are each engine's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from rollout.config import DEFAULT_MAX_TOKENS, InferenceConfig
from rollout.models.spec import ModelSpec

# Fields of ModelSpec that are not compared, with the reason. All others shape the numbers.
OWN_MODEL_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "shard": "the parts of all ranks make the whole model",
        "num_mtp_layers": "these layers are not served",
        "eos_token_ids": "compared as end_token_ids, with those of the tokenizer",
    }
)
# Fields of InferenceConfig that change what a request is answered, or which updates are taken.
SHARED_CONFIG_FIELDS = (
    *("kv_cache_management_mode", "max_kv_staleness_versions", "prefix_reuse_across_versions"),
    *("enable_chunked_prefill", "materialize_only_last_token_logits", "deterministic"),
    "record_routing",
    *("track_paused_request_events", "track_generated_token_events"),
)
# Fields of InferenceConfig that are not compared: memory, speed, devices and reports.
OWN_CONFIG_FIELDS = (
    "max_sequence_length",  # compared as the engine has it: the model or the pool may allow less
    "dtype",  # compared as the model's
    *("block_size_tokens", "buffer_size_gb", "paused_buffer_size_gb", "static_kv_memory_pointers"),
    *("memory_kind", "unified_memory_level", "max_requests", "schedule_conservativeness"),
    "max_tokens",  # compared where it bounds prompts, which are not cut into chunks then
    "seed",  # clients name seeds
    *("enable_prefix_caching", "prefix_caching_eviction_policy"),
    "prefix_caching_coordinator_policy",  # the coordinator's
    *("device", "num_threads", "num_cuda_graphs"),
    *("cuda_graph_mixed_prefill_count", "use_cuda_graphs_for_non_decode_steps"),
    *("use_flashinfer_fused_rope", "tensor_parallel_size", "tensor_parallel_timeout_s"),
    *("tensor_parallel_start_timeout_s", "pg_collection"),
    *("mamba_memory_ratio", "mamba_inference_state_config"),
    "reject_non_finite_weights",  # an update that one engine refuses is taken by none
    *("metrics_writer", "logging_step_interval", "request_metadata_types"),
)
_MAX_TEXT = 200


def shared_settings(
    spec: ModelSpec,
    config: InferenceConfig,
    *,
    max_sequence_length: int,
    end_token_ids: Iterable[int],
) -> dict[str, str]:
    """Return the settings that engines of a fleet must share, as text by name; a nested field has a
    name like "rope.theta".

    max_sequence_length, end_token_ids: those that the engine applies.
    """
    max_tokens = config.max_tokens or DEFAULT_MAX_TOKENS
    values: dict[str, Any] = {
        "max_sequence_length": max_sequence_length,
        "end_token_ids": sorted(end_token_ids),
        "max_tokens": None if config.enable_chunked_prefill else max_tokens,
    }
    values |= {name: getattr(config, name) for name in SHARED_CONFIG_FIELDS}
    values |= {
        field.name: getattr(spec, field.name)
        for field in fields(spec)
        if field.name not in OWN_MODEL_FIELDS
    }
    return {name: _text(value) for name, value in _flat(values)}


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if is_dataclass(value) and not isinstance(value, type):
            yield from ((f"{name}.{f.name}", getattr(value, f.name)) for f in fields(value))
        else:
            yield name, value


def _text(value: Any) -> str:
    """Return a text that differs wherever values do. A long one is cut, and ends with its hash."""
    text = repr(_plain(value))
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]}... ({hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"


def _plain(value: Any) -> Any:
    """Return a value whose text does not depend on where it was read: a config.json may say 10000
    for 10000.0, and a list for a tuple."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value
