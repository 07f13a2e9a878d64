"""Requests as data: prompt and result, events, records over checkpoints, and new tokens."""

from rollout.requests.block_hash import HASH_BASE as HASH_BASE
from rollout.requests.block_hash import HASH_PRIME as HASH_PRIME
from rollout.requests.block_hash import compute_block_hashes_batched as compute_block_hashes_batched
from rollout.requests.codec import deserialize_tensor as deserialize_tensor
from rollout.requests.codec import serialize_tensor as serialize_tensor
from rollout.requests.dynamic_request import DynamicInferenceRequest as DynamicInferenceRequest
from rollout.requests.dynamic_request import (
    DynamicVLMInferenceRequest as DynamicVLMInferenceRequest,
)
from rollout.requests.event import DynamicInferenceEvent as DynamicInferenceEvent
from rollout.requests.event import DynamicInferenceEventType as DynamicInferenceEventType
from rollout.requests.record import DynamicInferenceRequestRecord as DynamicInferenceRequestRecord
from rollout.requests.request import InferenceRequest as InferenceRequest
from rollout.requests.request import Status as Status
from rollout.requests.request import VLMInferenceRequest as VLMInferenceRequest

__all__: list[str]
