"""What a request is: its document, its life log and its history. No scheduling, no device."""

from rollout.requests.block_hash import HASH_BASE, HASH_PRIME, compute_block_hashes_batched
from rollout.requests.codec import deserialize_tensor, serialize_tensor
from rollout.requests.dynamic_request import DynamicInferenceRequest, DynamicVLMInferenceRequest
from rollout.requests.event import DynamicInferenceEvent, DynamicInferenceEventType
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import InferenceRequest, Status, VLMInferenceRequest

__all__ = [
    "HASH_BASE",
    "HASH_PRIME",
    "DynamicInferenceEvent",
    "DynamicInferenceEventType",
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "DynamicVLMInferenceRequest",
    "InferenceRequest",
    "Status",
    "VLMInferenceRequest",
    "compute_block_hashes_batched",
    "deserialize_tensor",
    "serialize_tensor",
]
