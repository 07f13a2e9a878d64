"""Requests as data: prompts, results, events, and records of their history.

Used by users, `rollout.cli` and `trainer_hooks`. Each name's module is imported at the first use of
the name.
"""

from rollout.lazy_names import lazy_names as _lazy_names

# Module -> the names that this package exports from it. The stub beside this file lists the same.
_HOMES = {
    "rollout.requests.block_hash": "HASH_BASE HASH_PRIME compute_block_hashes_batched",
    "rollout.requests.codec": "deserialize_tensor serialize_tensor",
    "rollout.requests.dynamic_request": "DynamicInferenceRequest DynamicVLMInferenceRequest",
    "rollout.requests.event": "DynamicInferenceEvent DynamicInferenceEventType",
    "rollout.requests.record": "DynamicInferenceRequestRecord",
    "rollout.requests.request": "InferenceRequest Status VLMInferenceRequest",
}
__getattr__, __all__ = _lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
