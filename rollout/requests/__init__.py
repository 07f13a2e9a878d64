"""Requests as data: prompt and result, events, records over checkpoints, and new tokens."""

from rollout.lazy_names import lazy_names as _lazy_names

# Module -> its names in this package. The stub beside this file has the same.
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
