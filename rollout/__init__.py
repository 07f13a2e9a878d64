"""A rollout engine that lives inside a reinforcement-learning job for language models."""

from rollout.apis.async_llm import AsyncLLM
from rollout.apis.groups import RolloutGroup
from rollout.apis.llm import LLM
from rollout.config import (
    InferenceConfig,
    KVCacheManagementMode,
    MambaInferenceStateConfig,
    PrefixCachingCoordinatorPolicy,
    PrefixCachingEvictionPolicy,
)
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.engine.build import DynamicInferenceEngine
from rollout.engine.reports import EngineStats, ResumeReport, SuspendReport
from rollout.engine.state import EngineState
from rollout.errors import (
    BlockOverflowError,
    ConfigError,
    ContextOverflowError,
    DetokenizeError,
    EngineStateError,
    EventPayloadError,
    InvalidRequestError,
    MaxSequenceLengthOverflowError,
    ModelError,
    NonFiniteLogitsError,
    ProtocolError,
    RemoteError,
    RequestAbortedError,
    RequestOverflowError,
    RolloutError,
    TokenLimitClamped,
    TokenOverflowError,
    WeightUpdateError,
)
from rollout.requests import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    InferenceRequest,
    Status,
    VLMInferenceRequest,
    compute_block_hashes_batched,
    deserialize_tensor,
    serialize_tensor,
)
from rollout.runner.weight_update import WeightUpdateReport
from rollout.sampling_params import SamplingParams
from rollout.text import HFTokenizer, Tokenizer

__all__ = [
    "AsyncLLM",
    "BlockOverflowError",
    "ConfigError",
    "ContextOverflowError",
    "DataParallelInferenceCoordinator",
    "DetokenizeError",
    "DynamicInferenceEngine",
    "DynamicInferenceEvent",
    "DynamicInferenceEventType",
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "EngineState",
    "EngineStateError",
    "EngineStats",
    "EventPayloadError",
    "HFTokenizer",
    "InferenceConfig",
    "InferenceClient",
    "InferenceRequest",
    "InvalidRequestError",
    "KVCacheManagementMode",
    "LLM",
    "MambaInferenceStateConfig",
    "MaxSequenceLengthOverflowError",
    "ModelError",
    "NonFiniteLogitsError",
    "PrefixCachingCoordinatorPolicy",
    "PrefixCachingEvictionPolicy",
    "ProtocolError",
    "RemoteError",
    "RequestAbortedError",
    "RequestOverflowError",
    "ResumeReport",
    "RolloutError",
    "RolloutGroup",
    "SamplingParams",
    "Status",
    "SuspendReport",
    "TokenLimitClamped",
    "TokenOverflowError",
    "Tokenizer",
    "VLMInferenceRequest",
    "WeightUpdateError",
    "WeightUpdateReport",
    "compute_block_hashes_batched",
    "deserialize_tensor",
    "serialize_tensor",
]
