"""A rollout engine that runs inside a reinforcement-learning job for language models.

It exports the names that users import. Each name's module is imported at the first use of the name.
"""

from rollout.lazy_names import lazy_names as _lazy_names

__version__ = "0.13.0.dev0"  # pyproject.toml reads it here

# Module -> the names that this package exports from it. The stub beside this file lists the same.
_HOMES = {
    "rollout.apis.async_llm": "AsyncLLM",
    "rollout.apis.arguments": "RolloutGroup",
    "rollout.apis.llm": "LLM",
    "rollout.config": (
        "InferenceConfig KVCacheManagementMode MambaInferenceStateConfig "
        "PrefixCachingCoordinatorPolicy PrefixCachingEvictionPolicy"
    ),
    "rollout.coordinator.client.inference_client": "InferenceClient",
    "rollout.coordinator.coordinator": "DataParallelInferenceCoordinator",
    "rollout.engine.build": "DynamicInferenceEngine",
    "rollout.control.reports": "EngineStats ResumeReport SuspendReport WeightUpdateReport",
    "rollout.control.state": "EngineState",
    "rollout.errors": (
        "BlockOverflowError ClientStateError ConfigError ContextOverflowError "
        "CoordinatorLostError DetokenizeError EngineStateError EventPayloadError "
        "IntegrityError InvalidRequestError LockstepError MaxSequenceLengthOverflowError "
        "ModelError NonFiniteLogitsError ProtocolError RemoteError RequestAbortedError "
        "RequestOverflowError RolloutError TokenLimitClamped TokenOverflowError "
        "WeightUpdateError"
    ),
    "rollout.weights.lora": "LoraAdapter",
    "rollout.requests.block_hash": "compute_block_hashes_batched",
    "rollout.requests.codec": "deserialize_tensor serialize_tensor",
    "rollout.requests.dynamic_request": "DynamicInferenceRequest",
    "rollout.requests.event": "DynamicInferenceEvent DynamicInferenceEventType",
    "rollout.requests.record": "DynamicInferenceRequestRecord",
    "rollout.requests.request": "InferenceRequest Status VLMInferenceRequest",
    "rollout.sampling_params": "SamplingParams",
    "rollout.serve.config": "ServeConfig",
    "rollout.text": "HFTokenizer Tokenizer",
}
__getattr__, __all__ = _lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
