"""InferenceConfig: all settings of an engine, checked when a config is created.

Users, `rollout.apis`, the programs of `rollout.cli` and `trainer_hooks.train.job` create configs.
Values that no device supports are refused here. `rollout.backends.select.create_backend` refuses
values that a particular device does not support.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, TypeVar

from rollout.errors import ConfigError
from rollout.keyword_hints import refuses_with_hints
from rollout.ranges import (
    AnyValue,
    Choices,
    Fraction,
    Interval,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveInt,
    PositiveSeconds,
    PowersOfTwo,
    Seed,
    Text,
    check_fields,
    check_value,
)
from rollout.telemetry import MetricsWriter

GIB = 2**30
_E = TypeVar("_E", bound=Enum)


class KVCacheManagementMode(str, Enum):
    """What suspend does with the KV cache: keep it, copy it to the host, or drop it and recompute
    it after resume."""

    PERSIST = "persist"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


class PrefixCachingEvictionPolicy(str, Enum):
    """When a cached block leaves the prefix index: with its last user (REF_ZERO), or when its
    memory is needed (LRU)."""

    REF_ZERO = "ref_zero"
    LRU = "lru"


class PrefixCachingCoordinatorPolicy(str, Enum):
    """How a coordinator chooses one of the engines that have room for a request.

    - LONGEST_PREFIX chooses the engine that earlier got the longest prefix of the prompt.
    - FIRST_PREFIX_BLOCK chooses the engine that earlier got the first block of the prompt.
    - ROUND_ROBIN chooses each engine in turn.
    - LOAD_BALANCED chooses the engine of LONGEST_PREFIX if that engine's load is not too high, else
      the engine with the least load.
    """

    LONGEST_PREFIX = "longest_prefix"
    FIRST_PREFIX_BLOCK = "first_prefix_block"
    ROUND_ROBIN = "round_robin"
    LOAD_BALANCED = "load_balanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaInferenceStateConfig:
    """Shapes of a hybrid model's recurrent states, per request."""

    layer_type_list: list[Name]
    mamba_conv_states_shape: tuple[PositiveInt, ...]
    mamba_ssm_states_shape: tuple[PositiveInt, ...]

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


DTYPES = ("auto", "float32", "bfloat16", "float16")
UNIFIED = "unified"
STABLE_MEMORY_KINDS = ("reserved", "vmm", "torch_memory_saver", UNIFIED)
MEMORY_KINDS = ("auto", "device", *STABLE_MEMORY_KINDS)
DEFAULT_MAX_REQUESTS = 1024
DEFAULT_MAX_TOKENS = 16384
OWN_ENGINE = "rollout"
ENGINE_PACKAGES = "rollout.engines"  # entry points of packages with other engines
MAX_THREADS = 1024  # more threads than CPUs do not help
MAX_BLOCK_SIZE_TOKENS = 2**20
_PositiveGib = Annotated[float, Interval(0.0, 2**33, is_low_open=True, unit="GiB")]
_NonNegativeGib = Annotated[float, Interval(0.0, 2**33, unit="GiB")]
_NamedPolicy = Annotated[
    str, Text("the name of a registered policy, or a path such as 'package.module:Class'")
]


_OF_REQUESTS = "num_tokens_to_generate, of SamplingParams and not of an engine,"
_OF_FLEETS = "data_parallel_size, of LLM, AsyncLLM and rollout serve,"
_POOL = "buffer_size_gb (the GiB of the KV pool)"
# Settings of vLLM, SGLang and Megatron -> the setting here, for errors about unknown keywords.
CONFIG_HINTS = {
    "max_model_len": "max_sequence_length",
    "context_length": "max_sequence_length",
    "max_seq_len": "max_sequence_length",
    "max_length": "max_sequence_length",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "tensor_parallel": "tensor_parallel_size",
    "tensor_model_parallel_size": "tensor_parallel_size",
    "dp": _OF_FLEETS,
    "dp_size": _OF_FLEETS,
    "max_new_tokens": _OF_REQUESTS,
    "max_completion_length": _OF_REQUESTS,
    "max_num_seqs": "max_requests",
    "max_running_requests": "max_requests",
    "max_num_batched_tokens": "max_tokens",
    "max_prefill_tokens": "max_tokens (of a step)",
    "chunked_prefill_size": "max_tokens (of a step)",
    "gpu_memory_utilization": _POOL,
    "mem_fraction_static": _POOL,
    "max_total_tokens": _POOL,
    "num_gpu_blocks_override": _POOL,
    "block_size": "block_size_tokens",
    "page_size": "block_size_tokens",
    "torch_dtype": "dtype",
    "kv_cache_dtype": "dtype (of weights and KV)",
    "random_seed": "seed",
    "enforce_eager": "num_cuda_graphs=0",
    "disable_cuda_graph": "num_cuda_graphs=0",
    "disable_radix_cache": "enable_prefix_caching=False, the default,",
    "enable_deterministic_inference": "deterministic",
    "enable_return_routed_experts": "record_routing",
    "trust_remote_code": "not needed (code of a checkpoint is never run)",
}


@refuses_with_hints(CONFIG_HINTS, ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceConfig:
    """Config of one engine. Raises ConfigError, naming field, value and remedy.

    Enum fields accept the string values of their members. Sizes whose names end in gb are in GiB.

    block_size_tokens: tokens of a KV block, a power of two. None means 64 on a CPU, 256 on CUDA.
    buffer_size_gb: memory of the KV pool. None means the least of 20, a quarter of the memory, and
        what max_requests full sequences need.
    paused_buffer_size_gb: a request that finds no free block is paused and keeps its KV. While
        paused requests together hold more than this size, the newest of them is preempted. None
        means that the newest request is preempted at once.
    max_sequence_length: maximum number of tokens in prompt and output together. None means the
        model's number of positions, or the capacity of the KV pool if that is less.
    kv_cache_management_mode: what suspend does with the KV: persist, offload or recompute.
    static_kv_memory_pointers: whether KV tensors keep their addresses across suspend and resume.
    memory_kind: how KV and weights are allocated. On a CPU: device, or reserved, which keeps
        addresses. On CUDA: device, or one of three kinds that keep addresses. vmm is CUDA's virtual
        memory management. torch_memory_saver is a package, which ends the process if CUDA has no
        memory. unified is CUDA's unified memory: released KV and weights are copied to host memory,
        which must have room for all of them, and back. auto chooses device if suspends keep the KV.
        Otherwise auto chooses vmm on CUDA, and on a CPU reserved if addresses must stay, else
        device.
    unified_memory_level: 1 is the same as memory_kind="unified".
    max_kv_staleness_versions: maximum age of KV, in versions. After an update, requests with older
        KV are prefilled again, and older blocks of the prefix index do not match. None means no
        maximum.

    max_requests: maximum number of requests that run at once. None means 1024, or fewer if the pool
        is small.
    max_tokens: maximum number of tokens in one step. None means 16384.
    enable_chunked_prefill: whether long prompts are prefilled in pieces, beside rows that decode.
    schedule_conservativeness: fraction of the running requests' expected growth that admission
        keeps free. 1.0 keeps all of it free, and a larger number keeps more. None means 1.0, or 0.0
        if paused_buffer_size_gb is given.
    materialize_only_last_token_logits: False lets requests ask for prompt log-probs.
    seed: the seed from which requests without a seed derive theirs. None lets each engine draw and
        log its own seed, which `LLM.seed` returns.
    deterministic: makes tokens and log-probs bitwise equal for every scheduling of the requests.
        Supported on a CPU with compiled kernels, in float32 and bfloat16; refused elsewhere.
        Attention is slower.

    enable_prefix_caching: whether requests share the KV of common prefixes.
    prefix_caching_eviction_policy: ref_zero drops a block with its last user, lru when its space is
        needed.
    prefix_caching_coordinator_policy: how a coordinator chooses engines: a member, the name of a
        registered policy, or "package.module:Class".
    prefix_reuse_across_versions: whether a prefix written under older weights may be used.

    device: auto, cpu, cuda or cuda:N. With auto and cuda, each engine of a fleet gets its own
        visible device; with cuda:N all engines get that device.
    dtype: dtype of weights and KV: auto, float32, bfloat16 or float16.
    num_threads: threads of torch and of the compiled kernels. None means torch's number.
    num_cuda_graphs: maximum number of captured step shapes, up to half of them for steps that also
        prefill; 0 captures none. None sets no maximum for decode steps, whose sizes are 16 rows
        apart. Steps that score prompts have up to four more shapes, captured when they are first
        needed.
    cuda_graph_mixed_prefill_count: number of captured shapes of steps that also prefill. None means
        16.
    use_cuda_graphs_for_non_decode_steps: False captures decode steps only.
    use_flashinfer_fused_rope: True is refused, because the engine has its own fused kernel.
    tensor_parallel_size: the number of processes that run the engine together, each with a part of
        every layer. The sizes above are totals of all processes. See docs/tensor_parallel.md.
    tensor_parallel_timeout_s: seconds that the ranks wait for each other before the engine ends.
    tensor_parallel_start_timeout_s: seconds in which the ranks must load the model and, with
        pg_collection, call a method that another rank has called.
    pg_collection: process groups of a trainer. The processes of its group `tp` are the ranks of the
        engine. Each of them creates an LLM and calls the same methods.

    engine: the engine that runs the model: rollout, which is this package's, or one that another
        package offers (entry points `rollout.engines`), such as vllm. Another engine refuses the
        fields here that it does not support, by name.
    engine_options: options of another engine, by that engine's names; {} for "rollout".

    mamba_memory_ratio: refused, because models with recurrent states are not served yet.
    mamba_inference_state_config: refused for the same reason.

    reject_non_finite_weights: whether an update with NaN or infinity is refused.

    record_routing: whether requests record the experts that computed their tokens
        (`routing_indices`), in a mixture of experts.
    track_paused_request_events: whether requests get a PAUSE event each time they are paused.
    track_generated_token_events: whether requests get an event for each token.
    metrics_writer: an object with `log(metrics)`: wandb, a wandb run or a MetricsLogger.
    logging_step_interval: steps between two reports of step metrics to metrics_writer; 0 reports
        none.
    request_metadata_types: refused unless None. The tracked metadata is fixed, see
        DynamicInferenceRequest.get_metadata_types.
    """

    # KV cache
    block_size_tokens: Annotated[int, PowersOfTwo(MAX_BLOCK_SIZE_TOKENS)] | None = None
    buffer_size_gb: _PositiveGib | None = None
    paused_buffer_size_gb: _NonNegativeGib | None = None
    max_sequence_length: PositiveInt | None = None
    kv_cache_management_mode: KVCacheManagementMode = KVCacheManagementMode.PERSIST
    static_kv_memory_pointers: bool = False
    memory_kind: Annotated[str, Choices(MEMORY_KINDS)] = "auto"
    unified_memory_level: Annotated[int, Interval(0, 1)] = 0
    max_kv_staleness_versions: NonNegativeInt | None = None

    # Scheduling
    max_requests: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    enable_chunked_prefill: bool = True
    schedule_conservativeness: NonNegativeFloat | None = None
    materialize_only_last_token_logits: bool = True
    seed: Seed | None = None
    deterministic: bool = False

    # Prefix caching
    enable_prefix_caching: bool = False
    prefix_caching_eviction_policy: PrefixCachingEvictionPolicy = (
        PrefixCachingEvictionPolicy.REF_ZERO
    )
    prefix_caching_coordinator_policy: PrefixCachingCoordinatorPolicy | _NamedPolicy = (
        PrefixCachingCoordinatorPolicy.LOAD_BALANCED
    )
    prefix_reuse_across_versions: bool = False

    # Device
    device: Name = "auto"
    dtype: Annotated[str, Choices(DTYPES)] = "auto"
    num_threads: Annotated[int, Interval(1, MAX_THREADS)] | None = None
    num_cuda_graphs: NonNegativeInt | None = None
    cuda_graph_mixed_prefill_count: NonNegativeInt | None = 16
    use_cuda_graphs_for_non_decode_steps: bool = True
    use_flashinfer_fused_rope: bool | None = False
    tensor_parallel_size: PositiveInt = 1
    tensor_parallel_timeout_s: PositiveSeconds = 60.0
    tensor_parallel_start_timeout_s: PositiveSeconds = 1800.0
    pg_collection: Annotated[Any, AnyValue("its group tp is compared below")] = None

    # Another engine
    engine: Name = OWN_ENGINE
    engine_options: Options = field(default_factory=dict)

    # Hybrid models
    mamba_memory_ratio: Fraction | None = None
    mamba_inference_state_config: MambaInferenceStateConfig | None = None

    # Weights
    reject_non_finite_weights: bool = True

    # Reports
    record_routing: bool = False
    track_paused_request_events: bool = False
    track_generated_token_events: bool = False
    metrics_writer: Annotated[MetricsWriter | None, AnyValue("its log is checked below")] = None
    logging_step_interval: NonNegativeInt = 0
    request_metadata_types: list[tuple[Name, Annotated[Any, AnyValue("a dtype")], bool]] | None = (
        None
    )

    def __post_init__(self) -> None:
        # The type is compared by name, because a config is created without importing torch.
        if str(type(self.device)) == "<class 'torch.device'>":
            object.__setattr__(self, "device", str(self.device))
        check_fields(self, ConfigError)
        self._check_pg_collection()
        self._check_pairs()

    def _check_pg_collection(self) -> None:
        """Raise ConfigError if pg_collection has no group `tp`, or if the group's size contradicts
        `tensor_parallel_size`."""
        if self.pg_collection is None:
            return
        group: Any = getattr(self.pg_collection, "tp", None)
        if not callable(getattr(group, "size", None)):
            raise ConfigError(
                f"pg_collection={self.pg_collection!r} has no process group of torch.distributed "
                "as its `tp`; give it one, of the processes that share this engine"
            )
        size = group.size()
        if self.tensor_parallel_size not in (1, size):
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} contradicts the {size} ranks of "
                "pg_collection.tp; leave it out"
            )

    def _check_pairs(self) -> None:
        """Raise ConfigError for fields that contradict each other or have no effect."""
        mode = self.kv_cache_management_mode
        if self.unified_memory_level and self.memory_kind not in ("auto", UNIFIED):
            raise ConfigError(
                f"unified_memory_level={self.unified_memory_level} contradicts "
                f"memory_kind={self.memory_kind!r}; use memory_kind='auto' or {UNIFIED!r}, or "
                "level 0"
            )
        stable = self.memory_kind in (*STABLE_MEMORY_KINDS, "auto")
        if (
            self.static_kv_memory_pointers
            and mode is not KVCacheManagementMode.PERSIST
            and not stable
        ):
            raise ConfigError(
                f"static_kv_memory_pointers=True with kv_cache_management_mode={mode.value!r} "
                f"cannot hold on memory_kind={self.memory_kind!r}: use memory_kind='auto' or one "
                f"of {STABLE_MEMORY_KINDS}, or kv_cache_management_mode='persist'"
            )
        if self.engine == OWN_ENGINE and self.engine_options:
            raise ConfigError(
                f"engine_options={dict(self.engine_options)!r} are of another engine, and this is "
                f"engine={OWN_ENGINE!r}; choose that engine, or use the fields of InferenceConfig"
            )
        if self.metrics_writer is not None and not callable(
            getattr(self.metrics_writer, "log", None)
        ):
            raise ConfigError(
                f"metrics_writer={self.metrics_writer!r} has no log(metrics) method; pass wandb, a "
                "wandb run or a trainer_hooks.MetricsLogger"
            )
        if self.logging_step_interval and self.metrics_writer is None:
            raise ConfigError(
                f"logging_step_interval={self.logging_step_interval} has nowhere to log to; set "
                "metrics_writer too"
            )
        for name in ("prefix_caching_eviction_policy", "prefix_reuse_across_versions"):
            value = getattr(self, name)
            if not self.enable_prefix_caching and value != _default(name):
                shown = value.value if isinstance(value, Enum) else value
                raise ConfigError(f"{name}={shown!r} needs enable_prefix_caching=True")
        for name, remedy in _NOT_BUILT.items():
            value, default = getattr(self, name), _default(name)
            if value != default:
                raise ConfigError(
                    f"{name}={value!r} is not supported: {remedy}; leave it at {default!r}"
                )

    def replace(self, **changes: Any) -> InferenceConfig:
        """Return a copy with `changes`, which is checked again."""
        return dataclasses.replace(self, **changes)


# Fields whose default is the only supported value, with the reason.
_NOT_BUILT = {
    "mamba_memory_ratio": "only dense attention models are served",
    "mamba_inference_state_config": "only dense attention models are served",
    "request_metadata_types": "what is tracked is DynamicInferenceRequest.get_metadata_types()",
}


def _default(name: str) -> Any:
    return InferenceConfig.__dataclass_fields__[name].default


def as_enum(name: str, kind: type[_E], value: object) -> _E:
    """Return the member of the enum `kind` that `value` is, or whose value it is. Raises
    ConfigError, naming the argument `name`, for any other value."""
    member: _E = check_value(name, value, kind, ConfigError)
    return member
