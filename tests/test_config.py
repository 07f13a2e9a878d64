"""Every InferenceConfig field does something that shows, or is refused off its default."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout import (
    LLM,
    ConfigError,
    DynamicInferenceEngine,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    InferenceConfig,
    InvalidRequestError,
    KVCacheManagementMode,
    MambaInferenceStateConfig,
    SamplingParams,
    WeightUpdateError,
)
from rollout.apis.arguments import config_with
from rollout.backends.select import block_size_of
from rollout.config import CONFIG_HINTS
from rollout.errors import LockstepError
from rollout.models.checkpoints.loading import build_model
from rollout.tensor_parallel.executor import TensorParallelExecutor
from tests.inspected_engine import InspectedEngine
from tests.tiny_mixtures import tiny_mixture
from tests.tiny_models import (
    Margins,
    drain,
    generate_all,
    pool_gb,
    prompt_of,
    tiny_engine,
    tiny_model,
)


class ListWriter:
    """A MetricsWriter that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, metrics: Mapping[str, float]) -> None:
        self.rows.append(dict(metrics))


@cache
def model() -> Any:
    return tiny_model()


PROMPT = list(range(1, 21))


def params(num_tokens: int = 4, **changes: Any) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=num_tokens, **changes)


def ran(
    num_prompt: int = 20, num_requests: int = 1, **config: Any
) -> list[DynamicInferenceRequest]:
    return generate_all(
        tiny_engine(model(), **config), [(prompt_of(num_prompt), params())] * num_requests
    )


def stepped(num_prompt: int = 20, **config: Any) -> DynamicInferenceEngine:
    """An engine with four requests in context."""
    engine = tiny_engine(model(), **config)
    for _ in range(4):
        engine.add_request(prompt_of(num_prompt), params())
    engine.step()
    return engine


def crowded(**config: Any) -> tuple[DynamicInferenceEngine, list[DynamicInferenceRequest]]:
    """Requests that outgrow a small pool."""
    engine = tiny_engine(model(), num_blocks=12, **config)
    return engine, generate_all(engine, [(prompt_of(15), params(30))] * 5)


def pointers_after_a_release(**config: Any) -> bool:
    """Return whether the addresses are unchanged although others took memory meanwhile."""
    engine = tiny_engine(model(), kv_cache_management_mode="recompute", **config)
    before = engine.kv_data_ptrs()
    engine.pause()
    engine.suspend()
    ballast = [torch.ones(engine_bytes(before)) for _ in range(4)]
    engine.resume()
    del ballast
    return engine.kv_data_ptrs() == before


def engine_bytes(pointers: dict[str, int]) -> int:
    low, high = sorted(pointers.values())
    return 2 * (high - low)


# ---- what shows


def test_the_default_block_size_is_the_devices_and_a_given_one_is_obeyed() -> None:
    assert InferenceConfig().block_size_tokens is None
    sizes = {"cpu": 64, "cuda": 256}
    for device, size in sizes.items():
        assert block_size_of(InferenceConfig(device=device)) == size
        assert block_size_of(InferenceConfig(device=device, block_size_tokens=16)) == 16
    assert tiny_engine(model(), block_size_tokens=None).block_size_tokens == 64
    assert tiny_engine(model(), block_size_tokens=256).block_size_tokens == 256


def check_block_size_tokens() -> None:
    assert stepped(block_size_tokens=8, num_blocks=64).stats().num_blocks_used == 4 * 3
    assert stepped(block_size_tokens=32, num_blocks=64).stats().num_blocks_used == 4 * 1


def check_buffer_size_gb() -> None:
    for num_blocks in (5, 77):
        engine = tiny_engine(model(), buffer_size_gb=pool_gb(model(), num_blocks))
        assert engine.stats().num_blocks_total == num_blocks


def check_paused_buffer_size_gb() -> None:
    assert crowded(paused_buffer_size_gb=1.0)[0].stats().num_pauses > 0
    engine, _ = crowded(paused_buffer_size_gb=0.0)
    assert engine.stats().num_pauses == 0
    assert engine.stats().num_evictions > 0


def check_schedule_conservativeness() -> None:
    assert crowded()[0].stats().num_evictions == 0
    assert crowded(schedule_conservativeness=0.0)[0].stats().num_evictions > 0
    with pytest.raises(ConfigError, match=r"schedule_conservativeness=-1\.0 must be .* at least 0"):
        InferenceConfig(schedule_conservativeness=-1.0)


def check_max_sequence_length() -> None:
    assert ran(max_sequence_length=21)[0].generated_length == 1
    (request,) = ran(max_sequence_length=20)
    assert request.finish_reason == "error"


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 64),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}, 192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    ],
    ids=["none", "linear", "yarn", "yarn in the config already"],
)
def test_sequences_are_no_longer_than_the_model_has_positions(
    scaling: dict[str, Any] | None, longest: int
) -> None:
    rope = {} if scaling is None else {"rope_parameters": {"rope_theta": 1e4, **scaling}}
    short = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=64, **rope)
    with pytest.raises(ConfigError, match=f"max_sequence_length={longest + 1} .* {longest} pos"):
        tiny_engine(short, max_sequence_length=longest + 1)
    assert tiny_engine(short, max_sequence_length=longest).stats().num_steps == 0
    engine = tiny_engine(short, max_sequence_length=None)
    engine.add_request(prompt_of(5), SamplingParams())
    assert drain(engine)[0].num_tokens == longest


@cache
def long_model() -> Any:
    return tiny_model("llama", num_hidden_layers=1, max_position_embeddings=131_072)


def test_without_a_longest_sequence_it_is_the_longest_that_the_pool_holds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="rollout.worker.loading"):
        engine = tiny_engine(long_model(), max_sequence_length=None, num_blocks=5)
    (message,) = [r.getMessage() for r in caplog.records if r.name == "rollout.worker.loading"]
    assert "max_sequence_length=40" in message
    assert "131072; raise buffer_size_gb" in message
    engine.add_request(prompt_of(7), SamplingParams(ignore_eos=True))
    assert drain(engine)[0].num_tokens == 40


def test_a_long_context_takes_no_memory_before_it_is_used() -> None:
    engine = tiny_engine(long_model(), max_sequence_length=None, num_blocks=2**14 + 1)
    assert engine.build.sizes.max_sequence_length == 131_072
    assert engine.build.model.rotary[0].num_positions < 10_000


def test_tokens_are_right_on_both_sides_of_where_the_positions_grow() -> None:
    engine, margins = (
        tiny_engine(long_model(), max_sequence_length=None, num_blocks=1024),
        Margins(),
    )
    reserved = engine.build.model.rotary[0].num_positions
    for request in generate_all(engine, [(prompt_of(reserved - 3), params(8, seed=1))]):
        margins.compare_with_oracle(long_model(), request)
    assert engine.build.model.rotary[0].num_positions > reserved
    margins.check()


def test_requests_without_a_limit_run_beside_each_other_however_long_they_might_get() -> None:
    """The pool holds one sequence of full length, and eight of usual ones."""
    for limit, num_running in ((None, 8), (16_000, 1)):
        engine = tiny_engine(long_model(), max_sequence_length=None, num_blocks=2**11 + 2**9)
        for _ in range(8):
            engine.add_request(prompt_of(7), SamplingParams(num_tokens_to_generate=limit))
        engine.step()
        assert engine.stats().num_running == num_running


def check_kv_cache_management_mode() -> None:
    released = {}
    for mode in KVCacheManagementMode:
        engine = stepped(kv_cache_management_mode=mode)
        engine.pause()
        report = engine.suspend()
        released[mode.value] = (report.bytes_released > 0, report.bytes_on_host > 0)
    assert released == {
        "persist": (False, False),
        "offload": (True, True),
        "recompute": (True, False),
    }


def check_static_kv_memory_pointers() -> None:
    assert pointers_after_a_release(static_kv_memory_pointers=True)
    with pytest.raises(ConfigError, match=r"static_kv_memory_pointers=True.*memory_kind='device'"):
        InferenceConfig(
            static_kv_memory_pointers=True,
            kv_cache_management_mode="offload",
            memory_kind="device",
        )
    engine = tiny_engine(model(), static_kv_memory_pointers=True)
    engine.pause()
    with pytest.raises(ConfigError, match="static_kv_memory_pointers"):
        engine.suspend("offload")
    assert engine.suspend("persist").bytes_released == 0


def check_memory_kind() -> None:
    assert pointers_after_a_release(memory_kind="reserved")
    for kind in ("torch_memory_saver", "vmm", "unified", "nonsense"):
        with pytest.raises(ConfigError, match=f"memory_kind='{kind}'"):
            tiny_engine(model(), memory_kind=kind)


def check_max_kv_staleness_versions() -> None:
    engine = stepped(max_kv_staleness_versions=0)
    engine.pause()
    engine.set_generation_epoch(1)
    assert engine.stats().num_recomputed_requests == 4


def check_max_requests() -> None:
    assert stepped(max_requests=3).stats().num_running == 3


def check_max_tokens() -> None:
    assert stepped(max_tokens=40, enable_chunked_prefill=False).stats().num_running == 2
    assert ran(max_tokens=19, enable_chunked_prefill=False)[0].finish_reason == "error"


def check_enable_chunked_prefill() -> None:
    assert ran(max_tokens=19, enable_chunked_prefill=True)[0].finish_reason == "length"
    assert stepped(max_tokens=30, enable_chunked_prefill=True).stats().num_prefill_tokens == 30


def check_materialize_only_last_token_logits() -> None:
    wanted = params(skip_prompt_log_probs=False)
    engine = tiny_engine(model(), materialize_only_last_token_logits=True)
    with pytest.raises(InvalidRequestError, match="materialize_only_last_token_logits=False"):
        engine.add_request([1, 2], wanted)
    engine = tiny_engine(model(), materialize_only_last_token_logits=False)
    assert len(generate_all(engine, [([1, 2], wanted)])[0].prompt_log_probs) == 1


def check_seed() -> None:
    seeds = (1, 1, 2, None, None)
    first, again, *others = (tuple(ran(seed=seed)[0].generated_tokens) for seed in seeds)
    assert first == again
    assert len({first, *others}) == 4


def check_device() -> None:
    assert ran(device="cpu")[0].finish_reason == "length"
    for device in ("tpu", "cuda:7"):
        with pytest.raises(ConfigError, match=f"device='{device}'"):
            tiny_engine(model(), device=device)


def check_dtype() -> None:
    blocks = {
        dtype: tiny_engine(model(), dtype=dtype).stats().num_blocks_total
        for dtype in ("auto", "float32", "bfloat16")
    }
    assert blocks == {"auto": 512, "float32": 512, "bfloat16": 1024}
    with pytest.raises(ConfigError, match="dtype='int8'"):
        InferenceConfig(dtype="int8")


def check_num_threads() -> None:
    tiny_engine(model(), num_threads=2)
    assert torch.get_num_threads() == 2


@contextmanager
def two_ranks(**config: Any) -> Iterator[tuple[InspectedEngine, int]]:
    """An engine of two ranks, and the process of rank 1."""
    size = pool_gb(model(), 64)
    # To read a model of transformers, another process would have to import that.
    own = build_model(deepcopy(model()))
    engine = tiny_engine(own, buffer_size_gb=size, tensor_parallel_size=2, num_threads=1, **config)
    assert isinstance(engine.executor, TensorParallelExecutor)
    yield engine, engine.executor.pids[0]
    engine.shutdown()


def check_tensor_parallel_size() -> None:
    whole = tiny_engine(model(), num_blocks=64).memory_status()
    with two_ranks() as (engine, _):
        num_bytes = engine.build.weights.num_bytes
        assert engine.build.backend.collectives.size == 2
        assert num_bytes < engine.memory_status().resident_bytes["weights"]
        assert num_bytes < whole.resident_bytes["weights"]


def check_tensor_parallel_timeout_s() -> None:
    with two_ranks(tensor_parallel_timeout_s=0.5) as (engine, pid):
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(LockstepError, match=r"in time \(0\.5 s\)"):
            engine.weights_checksum()


def check_tensor_parallel_start_timeout_s() -> None:
    with (
        pytest.raises(ConfigError, match=r"did not start within 1e-06 s"),
        two_ranks(tensor_parallel_start_timeout_s=1e-6),
    ):
        pass


def check_pg_collection() -> None:
    """What several ranks do with it is tested with LLM, tests/apis/test_spmd.py."""
    with pytest.raises(ConfigError, match=r"pg_collection=.* has no process group"):
        tiny_engine(model(), pg_collection=object())
    with pytest.raises(ConfigError, match="pg_collection needs an LLM"):
        tiny_engine(model(), pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: 2)))


def check_reject_non_finite_weights() -> None:
    weights = {name: torch.full_like(p, torch.inf) for name, p in model().named_parameters()}
    with pytest.raises(WeightUpdateError, match="reject_non_finite_weights"):
        tiny_engine(model()).update_weights(weights, in_flight=True)
    engine = tiny_engine(model(), reject_non_finite_weights=False)
    assert engine.update_weights(weights, in_flight=True).version == 1


def num_events(requests: list[DynamicInferenceRequest], name: str) -> int:
    kind = DynamicInferenceEventType[name]
    return sum(event.type is kind for request in requests for event in request.events)


def check_track_paused_request_events() -> None:
    assert num_events(crowded(paused_buffer_size_gb=1.0)[1], "PAUSE") == 0
    engine, requests = crowded(paused_buffer_size_gb=1.0, track_paused_request_events=True)
    assert num_events(requests, "PAUSE") == engine.stats().num_pauses > 0


def check_track_generated_token_events() -> None:
    assert num_events(ran(), "GENERATED_TOKEN") == 0
    (request,) = ran(track_generated_token_events=True)
    kind = DynamicInferenceEventType.GENERATED_TOKEN
    tokens = [event.payload["token_id"] for event in request.events if event.type is kind]
    assert tokens == request.generated_tokens


def check_metrics_writer() -> None:
    writer = ListWriter()
    engine = stepped(metrics_writer=writer)
    assert not writer.rows
    engine.pause()
    engine.suspend()
    engine.update_weights(dict(model().named_parameters()))
    engine.resume()
    kinds = ["suspend", "update", "resume"]
    for row, kind in zip(writer.rows, kinds, strict=True):
        assert row["engine/step"] == 1
        assert row[f"engine/{kind}/seconds"] > 0
        assert all(isinstance(value, int | float) for value in row.values())
    with pytest.raises(ConfigError, match="metrics_writer=5"):
        InferenceConfig(metrics_writer=5)


def check_logging_step_interval() -> None:
    writer = ListWriter()
    engine = stepped(metrics_writer=writer, logging_step_interval=2)
    drain(engine)
    assert [row["engine/step"] for row in writer.rows] == [2, 4]
    assert writer.rows[0]["engine/last_step/num_decode_tokens"] == 4
    with pytest.raises(ConfigError, match="logging_step_interval=2"):
        InferenceConfig(logging_step_interval=2)


def hit_tokens_of_a_second_run(*, new_weights: bool = False, **config: Any) -> int:
    """Prompt tokens that a request finds computed by an equal one before it."""
    engine = tiny_engine(model(), block_size_tokens=4, **config)
    for _ in range(2):
        engine.add_request(PROMPT, params())
        drain(engine)
        if new_weights:
            engine.update_weights(dict(model().named_parameters()), in_flight=True)
    return engine.stats().num_prefix_hit_tokens


LRU = {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru"}


def check_enable_prefix_caching() -> None:
    assert hit_tokens_of_a_second_run() == 0
    assert hit_tokens_of_a_second_run(**LRU) == 16


def check_prefix_caching_eviction_policy() -> None:
    assert hit_tokens_of_a_second_run(enable_prefix_caching=True) == 0
    assert hit_tokens_of_a_second_run(**LRU) == 16
    with pytest.raises(ConfigError, match="prefix_caching_eviction_policy="):
        InferenceConfig(prefix_caching_eviction_policy="lru")


def check_prefix_reuse_across_versions() -> None:
    assert hit_tokens_of_a_second_run(new_weights=True, **LRU) == 0
    reused = hit_tokens_of_a_second_run(new_weights=True, prefix_reuse_across_versions=True, **LRU)
    assert reused == 16
    with pytest.raises(ConfigError, match="prefix_reuse_across_versions="):
        InferenceConfig(prefix_reuse_across_versions=True)


def check_record_routing() -> None:
    """What is recorded is tested with the engine."""
    (request,) = generate_all(
        tiny_engine(tiny_mixture(), record_routing=True), [(PROMPT, params())]
    )
    assert request.routing_indices is not None
    with pytest.raises(ConfigError, match="record_routing=True with a 'qwen3' model"):
        tiny_engine(model(), record_routing=True)


def check_deterministic() -> None:
    """What it promises is tested with the engine; here, that it asks for the compiled kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLOUT_NATIVE", "0")
        with pytest.raises(ConfigError, match="deterministic=True needs the compiled kernels"):
            tiny_engine(model(), deterministic=True)


def check_engine() -> None:
    """tests/rollout_vllm tests the work of another engine."""
    with pytest.raises(ConfigError, match=r"engine='rolout' is unknown; did you mean rollout\?"):
        LLM(model(), engine="rolout")
    with pytest.raises(ConfigError, match="engine='vllm' is another engine"):
        tiny_engine(model(), engine="vllm")


def check_engine_options() -> None:
    with pytest.raises(ConfigError, match=r"engine_options.*another engine"):
        InferenceConfig(engine_options={"gpu_memory_utilization": 0.8})


# ---- what is refused


def refuses(*values: Any) -> Callable[[str], None]:
    def check(name: str) -> None:
        for value in values:
            with pytest.raises(ConfigError, match=f"{name}="):
                tiny_engine(model(), **{name: value})

    return check


MAMBA = MambaInferenceStateConfig(
    layer_type_list=["*"], mamba_conv_states_shape=(1,), mamba_ssm_states_shape=(1,)
)
REFUSED: dict[str, Callable[[str], None]] = {
    "unified_memory_level": refuses(1),
    "num_cuda_graphs": refuses(0, 4),
    "cuda_graph_mixed_prefill_count": refuses(0, None),
    "use_cuda_graphs_for_non_decode_steps": refuses(False),
    "use_flashinfer_fused_rope": refuses(True, None),
    "mamba_memory_ratio": refuses(0.5),
    "mamba_inference_state_config": refuses(MAMBA),
    "request_metadata_types": refuses([], [("temperature", torch.float32, True)]),
}


def check_prefix_caching_coordinator_policy() -> None:
    """What a coordinator makes of it is tested with AsyncLLM."""
    name = "prefix_caching_coordinator_policy"
    for value in ("round_robin", "longest_prefix", "package.module:Own"):
        with pytest.raises(ConfigError, match=f"{name}=.*use_coordinator=True"):
            LLM(model(), inference_config=InferenceConfig(**{name: value}))
    for value in (7, None, ""):
        with pytest.raises(ConfigError, match=f"{name}=.*round_robin"):
            InferenceConfig(**{name: value})


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(InferenceConfig)])
def test_no_field_is_silently_ignored(name: str) -> None:
    check = globals().get(f"check_{name}")
    assert (check is None) == (name in REFUSED), f"{name} needs one entry in this table"
    REFUSED[name](name) if check is None else check()


# ---- bad values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size_tokens", 0),
        ("block_size_tokens", -8),
        ("block_size_tokens", 24),
        ("block_size_tokens", "16"),
        ("block_size_tokens", 16.0),
        ("block_size_tokens", True),
        ("buffer_size_gb", 0),
        ("buffer_size_gb", -1.0),
        ("buffer_size_gb", float("nan")),
        ("buffer_size_gb", float("inf")),
        ("buffer_size_gb", "1"),
        ("paused_buffer_size_gb", -0.5),
        ("paused_buffer_size_gb", float("nan")),
        ("max_sequence_length", 0),
        ("max_sequence_length", 2.5),
        ("max_requests", 0),
        ("max_tokens", -1),
        ("num_threads", 0),
        ("num_threads", "many"),
        ("num_threads", 2**70),
        ("device", None),
        ("device", 0),
        ("logging_step_interval", -1),
        ("max_kv_staleness_versions", -1),
        ("seed", "x"),
        ("seed", 1.5),
        ("enable_chunked_prefill", "false"),
        ("reject_non_finite_weights", 0),
        ("kv_cache_management_mode", "keep"),
        ("kv_cache_management_mode", None),
        ("prefix_caching_eviction_policy", "mru"),
        ("memory_kind", "disk"),
        ("memory_kind", None),
        ("dtype", "float8"),
    ],
)
def test_a_bad_value_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        InferenceConfig(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)


def test_a_block_size_that_is_no_power_of_two_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nearest is 32"):
        InferenceConfig(block_size_tokens=30)


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(TypeError, match="block_sise"):
        InferenceConfig(block_sise=16)
    with pytest.raises(TypeError, match="block_sise"):
        InferenceConfig().replace(block_sise=16)


def test_a_config_is_frozen_and_checks_its_replacements() -> None:
    config = InferenceConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3
    assert config.replace(seed=3).seed == 3
    assert config.seed is None
    with pytest.raises(ConfigError, match="max_tokens=0"):
        config.replace(max_tokens=0)


def test_enums_accept_their_string_values() -> None:
    config = InferenceConfig(kv_cache_management_mode="offload")
    assert config.kv_cache_management_mode is KVCacheManagementMode.OFFLOAD


def test_a_buffer_that_holds_no_block_names_the_least_size() -> None:
    with pytest.raises(ConfigError, match=r"buffer_size_gb=1e-09 holds no block of .* at least"):
        tiny_engine(model(), buffer_size_gb=1e-9)


def test_the_default_buffer_is_bounded_by_what_max_requests_can_use() -> None:
    config = InferenceConfig(block_size_tokens=16, max_sequence_length=64, max_requests=3)
    engine = DynamicInferenceEngine.from_model(model(), config)
    assert engine.stats().num_blocks_total == 3 * 4


@pytest.mark.parametrize("version", [1.5, "3", 2**31])
def test_a_first_weights_version_that_is_no_32_bit_integer_is_refused(version: Any) -> None:
    with pytest.raises(ConfigError, match=f"weights_version={version!r}"):
        tiny_engine(model(), weights_version=version)


def test_a_keyword_of_another_engine_is_refused_with_ours() -> None:
    with pytest.raises(
        ConfigError, match=r"max_model_len=64 is unknown; .* is max_sequence_length"
    ):
        InferenceConfig(max_model_len=64)  # type: ignore[call-arg]
    with pytest.raises(
        ConfigError, match=r"block_size=64 is unknown; .* is block_size_tokens here"
    ):
        config_with(None, {"block_size": 64})
    assert not set(CONFIG_HINTS) & {field.name for field in dataclasses.fields(InferenceConfig)}
