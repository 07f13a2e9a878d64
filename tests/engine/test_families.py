"""Every family through the whole engine, against the trainer's forward pass without a cache.

Prompt and sampled log-probs within 1e-4; greedy tokens equal, save where two logits are closer than
1e-5.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from rollout import ConfigError, DynamicInferenceEngine, DynamicInferenceRequest, SamplingParams
from rollout.backends.cpu.library import load_library
from rollout.models import build_model, save_hf_directory
from rollout.models.families.registry import FAMILIES
from tests.family_cases import FAMILY_CASES, WINDOW, family_model, family_of
from tests.inspected_engine import InspectedEngine
from tests.tiny_models import (
    Margins,
    drain,
    expected_logprobs,
    full_logits,
    prompt_of,
    suspend_and_resume,
    tiny_engine,
    tokens_of,
)

TOLERANCE = 1e-4
LENGTHS = (1, WINDOW, 45)
MODES = ("persist", "offload", "recompute")
all_families = pytest.mark.parametrize("family", FAMILY_CASES)
# Each family in one KV mode; in the others, too, where there is more time.
families_and_modes = pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(family, mode, marks=[] if place % 3 == index % 3 else pytest.mark.slow)
        for (place, family), (index, mode) in product(enumerate(FAMILY_CASES), enumerate(MODES))
    ],
)


@cache
def model_of(family: str, seed: int = 0) -> Any:
    return family_model(family, seed)


def chunking_engine(family: str, **config: Any) -> InspectedEngine:
    """Return an engine with chunks of at most 24 tokens and a prefix cache."""
    fields = {"max_tokens": 24, "enable_chunked_prefill": True, "enable_prefix_caching": True}
    fields |= {"prefix_caching_eviction_policy": "lru", "max_sequence_length": 128} | config
    return tiny_engine(model_of(family), **fields)


def add_all(
    engine: DynamicInferenceEngine, num_greedy: int = 64, *, is_prompt_scored: bool = True
) -> None:
    """Greedy requests of several lengths, and a group of samples of the longest prompt."""
    wanted = {"return_log_probs": True, "skip_prompt_log_probs": not is_prompt_scored}
    greedy = SamplingParams(temperature=0.0, num_tokens_to_generate=num_greedy, **wanted)
    for length in LENGTHS:
        engine.add_request(prompt_of(length), greedy)
    samples = [SamplingParams(num_tokens_to_generate=9, seed=seed, **wanted) for seed in (1, 2)]
    engine.add_group(prompt_of(max(LENGTHS)), samples)


def assert_like_the_trainer(model: Any, requests: list[DynamicInferenceRequest]) -> None:
    margins = Margins()
    for request in requests:
        margins.compare_with_oracle(model, request)
        assert_logprobs(model, request)
    margins.check()


def assert_logprobs(model: Any, request: DynamicInferenceRequest) -> None:
    """Check the log-probs of generated tokens and, if requested, of the prompt."""
    tokens = tokens_of(request)
    logits_TV = full_logits(model, tokens[:-1])
    params = SamplingParams()
    expected = [
        expected_logprobs(logits_V, params)[token]
        for logits_V, token in zip(logits_TV, tokens[1:], strict=True)
    ]
    given = request.generated_log_probs.tolist()
    if not request.sampling_params.skip_prompt_log_probs:
        given = [*request.prompt_log_probs.tolist(), *given]
        assert len(given) == len(expected)
    assert_allclose(given, expected[-len(given) :], rtol=0, atol=TOLERANCE)


def test_every_family_has_a_case() -> None:
    assert {family_of(case) for case in FAMILY_CASES} == FAMILIES.keys()


@pytest.mark.drawn(7)
@all_families
def test_chunks_groups_and_prefix_hits_give_the_trainers_numbers(family: str) -> None:
    """Three rounds: nothing cached, all prompts cached, and after an update from another model,
    with chunks that sample nothing and score nothing.
    """
    engine, model = chunking_engine(family), model_of(family)
    add_all(engine)
    assert_like_the_trainer(model, list(drain(engine).values()))
    add_all(engine, num_greedy=4, is_prompt_scored=False)
    again = list(drain(engine).values())
    assert max(request.num_cached_tokens or 0 for request in again) >= 40
    assert_like_the_trainer(model, again)
    new_model = model_of(family, seed=1)
    engine.pause()
    engine.update_weights(new_model)
    engine.unpause()
    add_all(engine, num_greedy=4, is_prompt_scored=False)
    assert_like_the_trainer(new_model, list(drain(engine).values()))


@pytest.mark.drawn(7)
@families_and_modes
def test_suspends_and_evictions_change_no_number(family: str, mode: str) -> None:
    """A pool too small for all requests, suspended every few steps."""
    tight = {"num_blocks": 11, "schedule_conservativeness": 0.0}
    engine = chunking_engine(family, kv_cache_management_mode=mode, **tight)
    add_all(engine, num_greedy=24)
    finished: dict[int, DynamicInferenceRequest] = {}
    for step in range(2_000):
        finished |= {record.request_id: record.merge() for record in engine.step()}
        if not engine.has_unfinished_requests():
            break
        if step % 16 == 15:
            suspend_and_resume(engine)
    assert engine.stats().num_evictions > 0
    assert_like_the_trainer(model_of(family), list(finished.values()))


@pytest.mark.drawn(9)
@all_families
def test_the_compiled_decoder_gives_the_trainers_numbers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts, and decode rows; without compiled kernels in the torch path."""
    monkeypatch.setenv("ROLLOUT_TUNE", "native" if load_library() else "0")
    engine = tiny_engine(model_of(family), max_sequence_length=128)
    add_all(engine, num_greedy=3)
    assert_like_the_trainer(model_of(family), list(drain(engine).values()))


def test_sequences_end_where_longrope_changes_all_angles() -> None:
    tiny_engine(model_of("phi3"), max_sequence_length=256)
    with pytest.raises(ConfigError, match=r"max_sequence_length=257.*256 positions.*longrope"):
        tiny_engine(model_of("phi3"), max_sequence_length=257)


@pytest.mark.drawn(9)
@all_families
def test_bfloat16_is_as_near_to_float32_as_the_trainers_is(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the mean error of the log-probs of a prompt's tokens.

    In a mixture rounding may give a token another expert, here or there, which changes log-probs
    much more than rounding does. So several models are counted together, and less precisely.
    """
    monkeypatch.setenv("ROLLOUT_TUNE", "native" if load_library() else "0")
    num_models, factor = (4, 1.5) if FAMILIES[family_of(family)].mixture else (1, 1.2)
    errors = np.array([bfloat16_errors(family, seed) for seed in range(num_models)])
    ours, theirs = errors.mean(0)
    assert ours < factor * theirs


def bfloat16_errors(family: str, seed: int) -> tuple[float, float]:
    """The mean errors (of the engine, of the trainer's forward pass) in bfloat16."""
    model, prompt = deepcopy(model_of(family, seed)), prompt_of(max(LENGTHS))
    exact = prompt_logprobs(model, prompt)
    model.to(torch.bfloat16)
    engine = tiny_engine(model, max_sequence_length=128)
    engine.add_request(
        prompt, SamplingParams(num_tokens_to_generate=1, skip_prompt_log_probs=False)
    )
    (request,) = drain(engine).values()
    ours = np.abs(request.prompt_log_probs.numpy() - exact).mean()
    return ours, np.abs(prompt_logprobs(model, prompt) - exact).mean()


def prompt_logprobs(model: Any, prompt: list[int]) -> np.ndarray:
    """Of each token but the first, from the trainer's forward pass."""
    logits_TV = torch.from_numpy(full_logits(model, prompt[:-1]))
    return logits_TV.log_softmax(-1).numpy()[range(len(prompt) - 1), prompt[1:]]


@pytest.mark.drawn(9)
@all_families
def test_directories_hold_the_live_model_both_ways(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path / "theirs")
    live, loaded = build_model(model), build_model(tmp_path / "theirs")
    assert loaded.spec == live.spec
    save_hf_directory(loaded, tmp_path / "ours")
    theirs = type(model).from_pretrained(tmp_path / "ours", attn_implementation="eager")
    weights = live.read_weights()
    assert weights.keys() == loaded.read_weights().keys()
    for name, values in loaded.read_weights().items():
        assert torch.equal(weights[name], values), name
    given, read_back = model.state_dict(), theirs.state_dict()
    assert given.keys() == read_back.keys()
    assert all(torch.equal(given[name], values) for name, values in read_back.items())
    prompt = prompt_of(max(LENGTHS))
    assert_allclose(full_logits(theirs, prompt), full_logits(model, prompt), rtol=0, atol=1e-5)
