"""Collects the settings that must be equal in all engines of a fleet.

Equal settings make replies independent of the engine that gives them. The coordinator refuses an
engine whose settings differ from the fleet's. Settings of speed and memory are not collected.
Weights are compared by checksum instead. Used by `rollout.engine.build` and `rollout_vllm.engine`.
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

# Fields of ModelSpec that are not compared, with the reason. All other fields change logits.
OWN_MODEL_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "shard": "the parts of all ranks make the whole model",
        "num_mtp_layers": "these layers are not served",
        "eos_token_ids": "compared as end_token_ids, with the tokenizer's end token",
    }
)
# Fields of InferenceConfig that change the results of requests, or which updates are accepted.
SHARED_CONFIG_FIELDS = (
    "engine",
    *("kv_cache_management_mode", "max_kv_staleness_versions", "prefix_reuse_across_versions"),
    *("enable_chunked_prefill", "materialize_only_last_token_logits", "deterministic"),
    "record_routing",
    *("track_paused_request_events", "track_generated_token_events"),
)
_MAX_TEXT = 200


def shared_settings(
    spec: ModelSpec,
    config: InferenceConfig,
    *,
    max_sequence_length: int,
    end_token_ids: Iterable[int],
) -> dict[str, str]:
    """Return the settings that engines of a fleet must share, as texts by name. Fields of a nested
    dataclass have names like "rope.theta"."""
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
    return settings_as_texts(values)


def settings_as_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return a text of each setting by name. Different values have different texts."""
    return {name: _text(value) for name, value in _flat(values)}


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if is_dataclass(value) and not isinstance(value, type):
            yield from ((f"{name}.{f.name}", getattr(value, f.name)) for f in fields(value))
        else:
            yield name, value


def _text(value: Any) -> str:
    text = repr(_plain(value))
    if len(text) <= _MAX_TEXT:  # a longer text is cut, and its hash keeps it distinct
        return text
    return f"{text[:_MAX_TEXT]}... ({hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    # A config.json may have 10000 for 10000.0, or a list for a default's tuple.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value
