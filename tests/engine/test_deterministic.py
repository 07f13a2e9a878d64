"""`deterministic=True`: tokens and log-probs are bitwise equal under every schedule."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout import DynamicInferenceRequest, SamplingParams
from rollout.backends.cpu.library import load_library
from rollout.errors import ConfigError
from tests.family_cases import family_model
from tests.tiny_models import drain, prompt_of, suspend_and_resume, tiny_engine, tiny_model

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C compiler")
NUM_TOKENS = 24


def params(seed: int, **changes: Any) -> SamplingParams:
    fields = {"num_tokens_to_generate": NUM_TOKENS, "temperature": 1.0, "seed": seed}
    return SamplingParams(**(fields | {"return_log_probs": True, "ignore_eos": True} | changes))


REQUESTS = [
    (prompt_of(5), params(1)),
    (prompt_of(70), params(2, top_p=0.9)),
    (prompt_of(33), params(3, temperature=0.0)),
    (prompt_of(1), params(4, top_k=7)),
    (prompt_of(130, seed=1), params(5, min_p=0.02)),
    (prompt_of(64), params(6, repetition_penalty=1.2)),
]


def bits(request: DynamicInferenceRequest) -> tuple[list[int], bytes]:
    """Return tokens, and log-probs as bits."""
    log_probs = np.array([*request.generated_log_probs], dtype=np.float64)
    return [*request.generated_tokens], log_probs.tobytes()


@cache
def alone(family: str, dtype: torch.dtype = torch.float32) -> list[tuple[list[int], bytes]]:
    """Return the results of each request in an engine of its own."""
    found = []
    for prompt, sampling_params in REQUESTS:
        engine = tiny_engine(model_of(family).to(dtype), deterministic=True)
        request_id = engine.add_request(prompt, sampling_params)
        found.append(bits(drain(engine)[request_id]))
    return found


def model_of(family: str) -> Any:
    """Llama and Qwen without windows; others with all that they can have."""
    return tiny_model(family) if family in FAMILIES[:3] else family_model(family)


FAMILIES = ("llama", "qwen2", "qwen3", "gemma2")
MORE_FAMILIES = ("mistral", "ministral3", "olmo3", "smollm3", "granite", "glm4", "cohere2")


SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked": {"max_tokens": 16},
    "in large blocks": {"block_size_tokens": 64},
    "preempted": {"num_blocks": 24},
    "with cached prefixes": {
        "enable_prefix_caching": True,
        "prefix_caching_eviction_policy": "lru",
    },
    "on two threads": {"num_threads": 2},
}


@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in FAMILIES),
        *(pytest.param(f, torch.float32, marks=pytest.mark.slow) for f in MORE_FAMILIES),
        ("qwen3", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_changes_no_bit(family: str, dtype: torch.dtype, schedule: str) -> None:
    model = model_of(family).to(dtype)
    engine = tiny_engine(model, deterministic=True, **SCHEDULES[schedule])
    for _ in range(2):  # the second time, prefixes may be cached
        ids = [engine.add_request(prompt, given) for prompt, given in REQUESTS]
        finished = drain(engine)
        assert [bits(finished[i]) for i in ids] == alone(family, dtype)
    stats = engine.stats()
    assert (schedule == "preempted") <= (stats.num_evictions > 0)
    assert (schedule == "with cached prefixes") == (stats.num_prefix_hit_tokens > 0)


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_a_suspend_changes_no_bit(mode: str) -> None:
    engine = tiny_engine(tiny_model(), deterministic=True, kv_cache_management_mode=mode)
    ids = [engine.add_request(prompt, given) for prompt, given in REQUESTS]
    finished = {}
    while engine.has_unfinished_requests():
        for _ in range(5):
            finished |= {record.request_id: record.merge() for record in engine.step()}
        suspend_and_resume(engine)
    assert [bits(finished[i]) for i in ids] == alone("qwen3")


@given(data=st.data())
def test_no_random_schedule_changes_a_bit(data: st.DataObject) -> None:
    engine = tiny_engine(
        tiny_model(),
        deterministic=True,
        max_tokens=data.draw(st.sampled_from([7, 20, 64, 512]), label="max_tokens"),
        max_requests=data.draw(st.integers(1, 6), label="max_requests"),
        num_blocks=data.draw(st.integers(22, 60), label="num_blocks"),
        enable_prefix_caching=data.draw(st.booleans(), label="prefix caching"),
    )
    order = data.draw(st.permutations(range(len(REQUESTS))), label="order")
    ids: dict[int, int] = {}
    finished: dict[int, DynamicInferenceRequest] = {}
    for index in order:
        ids[index] = engine.add_request(*REQUESTS[index])
        for _ in range(data.draw(st.integers(0, 4), label="steps")):
            finished |= {record.request_id: record.merge() for record in engine.step()}
    finished |= drain(engine)
    assert [bits(finished[ids[i]]) for i in range(len(REQUESTS))] == alone("qwen3")


def test_a_mixture_of_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="deterministic=True needs layers of one attention"):
        tiny_engine(family_model("qwen3_moe"), deterministic=True)


@pytest.mark.parametrize(
    ("changes", "what"), [({"head_dim": 12}, "head_dim=12"), ({"hidden_size": 44}, "44")]
)
def test_a_model_that_the_kernels_do_not_take_is_refused(
    changes: dict[str, int], what: str
) -> None:
    with pytest.raises(ConfigError, match=f"deterministic=True.*{what}"):
        tiny_engine(tiny_model(**changes), deterministic=True)


def test_without_the_compiled_kernels_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_NATIVE", "0")
    with pytest.raises(ConfigError, match="deterministic=True needs the compiled kernels"):
        tiny_engine(tiny_model(), deterministic=True)


def test_another_forced_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_TUNE", "onednn")
    with pytest.raises(ConfigError, match="ROLLOUT_TUNE='onednn'"):
        tiny_engine(tiny_model(), deterministic=True)
