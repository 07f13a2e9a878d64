"""A rollout engine that runs inside a reinforcement-learning job for language models."""

from rollout.apis.arguments import RolloutGroup as RolloutGroup
from rollout.apis.async_llm import AsyncLLM as AsyncLLM
from rollout.apis.llm import LLM as LLM
from rollout.config import InferenceConfig as InferenceConfig
from rollout.config import KVCacheManagementMode as KVCacheManagementMode
from rollout.config import MambaInferenceStateConfig as MambaInferenceStateConfig
from rollout.config import PrefixCachingCoordinatorPolicy as PrefixCachingCoordinatorPolicy
from rollout.config import PrefixCachingEvictionPolicy as PrefixCachingEvictionPolicy
from rollout.control.reports import EngineStats as EngineStats
from rollout.control.reports import ResumeReport as ResumeReport
from rollout.control.reports import SuspendReport as SuspendReport
from rollout.control.reports import WeightUpdateReport as WeightUpdateReport
from rollout.control.state import EngineState as EngineState
from rollout.coordinator.client.inference_client import InferenceClient as InferenceClient
from rollout.coordinator.coordinator import (
    DataParallelInferenceCoordinator as DataParallelInferenceCoordinator,
)
from rollout.engine.build import DynamicInferenceEngine as DynamicInferenceEngine
from rollout.errors import BlockOverflowError as BlockOverflowError
from rollout.errors import ClientStateError as ClientStateError
from rollout.errors import ConfigError as ConfigError
from rollout.errors import ContextOverflowError as ContextOverflowError
from rollout.errors import CoordinatorLostError as CoordinatorLostError
from rollout.errors import DetokenizeError as DetokenizeError
from rollout.errors import EngineStateError as EngineStateError
from rollout.errors import EventPayloadError as EventPayloadError
from rollout.errors import IntegrityError as IntegrityError
from rollout.errors import InvalidRequestError as InvalidRequestError
from rollout.errors import LockstepError as LockstepError
from rollout.errors import MaxSequenceLengthOverflowError as MaxSequenceLengthOverflowError
from rollout.errors import ModelError as ModelError
from rollout.errors import NonFiniteLogitsError as NonFiniteLogitsError
from rollout.errors import ProtocolError as ProtocolError
from rollout.errors import RemoteError as RemoteError
from rollout.errors import RequestAbortedError as RequestAbortedError
from rollout.errors import RequestOverflowError as RequestOverflowError
from rollout.errors import RolloutError as RolloutError
from rollout.errors import TokenLimitClamped as TokenLimitClamped
from rollout.errors import TokenOverflowError as TokenOverflowError
from rollout.errors import WeightUpdateError as WeightUpdateError
from rollout.requests.block_hash import compute_block_hashes_batched as compute_block_hashes_batched
from rollout.requests.codec import deserialize_tensor as deserialize_tensor
from rollout.requests.codec import serialize_tensor as serialize_tensor
from rollout.requests.dynamic_request import DynamicInferenceRequest as DynamicInferenceRequest
from rollout.requests.event import DynamicInferenceEvent as DynamicInferenceEvent
from rollout.requests.event import DynamicInferenceEventType as DynamicInferenceEventType
from rollout.requests.record import DynamicInferenceRequestRecord as DynamicInferenceRequestRecord
from rollout.requests.request import InferenceRequest as InferenceRequest
from rollout.requests.request import Status as Status
from rollout.requests.request import VLMInferenceRequest as VLMInferenceRequest
from rollout.sampling_params import SamplingParams as SamplingParams
from rollout.serve.config import ServeConfig as ServeConfig
from rollout.text import HFTokenizer as HFTokenizer
from rollout.text import Tokenizer as Tokenizer
from rollout.weights.lora import LoraAdapter as LoraAdapter

__all__: list[str]
__version__: str
