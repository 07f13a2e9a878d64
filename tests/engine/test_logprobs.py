"""Log-probs of tokens, prompts and top-n against a full forward pass of the trainer's model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from rollout import DynamicInferenceRequest, SamplingParams
from tests.contracts.sampling_oracle import kept_tokens
from tests.tiny_models import (
    Margins,
    draw_of,
    expected_logprobs,
    full_logits,
    generate_all,
    generated_logits,
    prompt_of,
    tiny_engine,
    tiny_model,
)

TOLERANCE = 1e-4
MODES = ("raw", "temperature", "processed")
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top-k": {"temperature": 0.8, "top_k": 7},
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "min-p": {"temperature": 1.1, "min_p": 0.05},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "one": {"top_k": 1},
}


def params_of(sampler: str, mode: str, **changes: Any) -> SamplingParams:
    wanted = {"num_tokens_to_generate": 24, "return_log_probs": True, "logprobs_mode": mode}
    return SamplingParams(**(SAMPLERS[sampler] | wanted | {"seed": 5} | changes))


def sampled_batch(model: Any, **changes: Any) -> list[DynamicInferenceRequest]:
    """Return requests with every sampler in every mode, for one batch."""
    pairs = [(sampler, mode) for sampler in SAMPLERS for mode in MODES]
    requests = [
        (prompt_of(3 + 7 * i, seed=i), params_of(*pair, seed=i, **changes))
        for i, pair in enumerate(pairs)
    ]
    return generate_all(tiny_engine(model), requests)


def is_cut_the_same(logits_V: np.ndarray, params: SamplingParams) -> bool:
    """Whether truncation would keep the same tokens if logits were 1e-5 of themselves off."""
    if params.temperature == 0:
        return True
    low, high = (kept_tokens(logits_V * scale, draw_of(params)) for scale in (1 - 1e-5, 1 + 1e-5))
    return set(low) == set(high)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_sampled_tokens_and_their_logprobs_are_those_of_the_trainers_model(family: str) -> None:
    model, margins = tiny_model(family, seed=1), Margins()
    for request in sampled_batch(model):
        margins.compare_with_oracle(model, request)
        params = request.sampling_params
        for token, given, logits_V in zip(
            request.generated_tokens,
            request.generated_log_probs.tolist(),
            generated_logits(model, request),
            strict=True,
        ):
            if params.logprobs_mode == "processed" and not is_cut_the_same(logits_V, params):
                margins.exceptions.append(f"{request.request_id}: cut differently")
                continue
            expected = expected_logprobs(logits_V, params)[token]
            assert abs(given - expected) < TOLERANCE, (params, given, expected)
    margins.check()
    assert margins.num_tokens == 27 * 24


def test_a_tied_model_with_one_kv_head_has_the_trainers_logprobs() -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True, num_key_value_heads=1)
    for request in sampled_batch(model, temperature=1.0, top_k=0, top_p=0.0, min_p=0.0):
        logits_TV = generated_logits(model, request)
        expected = [
            expected_logprobs(logits_V, request.sampling_params)[token]
            for logits_V, token in zip(logits_TV, request.generated_tokens, strict=True)
        ]
        assert_allclose(request.generated_log_probs.numpy(), expected, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [None, 1, 8, 13])
def test_prompt_logprobs_are_raw_and_one_less_than_prompt_tokens(chunk: int | None) -> None:
    model = tiny_model("llama")
    config = {} if chunk is None else {"enable_chunked_prefill": True, "max_tokens": chunk}
    params = params_of("all", "processed", skip_prompt_log_probs=False, num_tokens_to_generate=3)
    prompts = [prompt_of(n) for n in (1, 2, 8, 9, 14, 40)]
    requests = generate_all(tiny_engine(model, **config), [(prompt, params) for prompt in prompts])
    for prompt, request in zip(prompts, requests, strict=True):
        raw_TV = np.stack(
            [expected_logprobs(row, SamplingParams()) for row in full_logits(model, prompt)]
        )
        expected = raw_TV[np.arange(len(prompt) - 1), prompt[1:]]
        assert len(request.prompt_log_probs) == len(prompt) - 1
        assert_allclose(request.prompt_log_probs.numpy(), expected, atol=TOLERANCE)


def test_a_prompt_longer_than_one_scoring_chunk_is_scored_whole() -> None:
    model = tiny_model("qwen3", max_position_embeddings=1024)
    prompt = prompt_of(900)
    engine = tiny_engine(model, max_sequence_length=1024)
    params = SamplingParams(num_tokens_to_generate=1, skip_prompt_log_probs=False)
    (request,) = generate_all(engine, [(prompt, params)])
    logits_TV = full_logits(model, prompt)
    expected = [
        expected_logprobs(row, SamplingParams())[token]
        for row, token in zip(logits_TV[:-1], prompt[1:], strict=True)
    ]
    assert_allclose(request.prompt_log_probs.numpy(), expected, atol=TOLERANCE)


def test_prompt_logprobs_are_none_unless_asked_for() -> None:
    (request,) = generate_all(tiny_engine(tiny_model()), [(prompt_of(9), params_of("cold", "raw"))])
    assert request.prompt_log_probs is None
    assert request.generated_top_n_logprobs is None


@pytest.mark.parametrize("mode", MODES)
def test_top_n_logprobs_are_the_best_tokens_in_the_requests_mode(mode: str) -> None:
    model = tiny_model("qwen2")
    requests = [
        (prompt_of(11), params_of(sampler, mode, top_n_logprobs=n, skip_prompt_log_probs=False))
        for sampler, n in (("cold", 5), ("all", 2), ("greedy", 1), ("hot", 0))
    ]
    for request in generate_all(tiny_engine(model), requests):
        top_n = request.sampling_params.top_n_logprobs
        if not top_n:
            assert request.generated_top_n_logprobs is None
            assert request.prompt_top_n_logprobs is None
            continue
        check_top_n(
            request.generated_top_n_logprobs,
            generated_logits(model, request),
            request.sampling_params,
        )
        prompt_TV = full_logits(model, request.prompt_tokens.tolist())[:-1]
        raw = SamplingParams(top_n_logprobs=top_n)
        check_top_n(request.prompt_top_n_logprobs, prompt_TV, raw)


def check_top_n(
    given: list[dict[int, float]], logits_TV: np.ndarray, params: SamplingParams
) -> None:
    assert len(given) == len(logits_TV)
    for best, logits_V in zip(given, logits_TV, strict=True):
        expected_V = expected_logprobs(logits_V, params)
        ranked = np.sort(expected_V)[::-1][: params.top_n_logprobs]
        assert len(best) == params.top_n_logprobs
        assert_allclose(list(best.values()), ranked, atol=TOLERANCE)
        assert_allclose([expected_V[token] for token in best], ranked, atol=TOLERANCE)


def test_greedy_logprobs_report_raw_in_all_three_modes() -> None:
    model = tiny_model("llama")
    batch = [(prompt_of(20), params_of("greedy", mode)) for mode in MODES]
    first, *others = generate_all(tiny_engine(model), batch)
    for other in others:
        assert other.generated_tokens == first.generated_tokens
        assert_allclose(other.generated_log_probs, first.generated_log_probs, atol=1e-6)
