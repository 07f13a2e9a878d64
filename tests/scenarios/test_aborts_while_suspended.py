"""Requests aborted while their KV is on the host: the same prompt never finds lost KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout import DynamicInferenceEngine, SamplingParams
from tests.tiny_models import BLOCK_SIZE, drain, prompt_of, tiny_engine, tiny_model

PROMPT = prompt_of(4 * BLOCK_SIZE)
PARAMS = SamplingParams(num_tokens_to_generate=3 * BLOCK_SIZE, seed=3, return_log_probs=True)


def ask(engine: DynamicInferenceEngine) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Tokens and log-probs that the engine gives for PROMPT."""
    request_id = engine.add_request(PROMPT, PARAMS)
    request = drain(engine)[request_id]
    return request.generated_tokens, np.asarray(request.generated_log_probs)


@pytest.mark.parametrize("policy", ["ref_zero", "lru"])
@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_the_prompt_of_a_request_aborted_while_suspended_finds_no_lost_kv(
    mode: str, policy: str
) -> None:
    engine = tiny_engine(
        tiny_model(), enable_prefix_caching=True, prefix_caching_eviction_policy=policy
    )
    ask(engine)  # its blocks stay, where the policy keeps them
    aborted = engine.add_request(PROMPT, PARAMS)
    for _ in range(BLOCK_SIZE):
        engine.step()
    engine.pause()
    engine.suspend(mode)
    engine.abort_request(aborted)
    assert engine.stats().num_blocks_used == 0
    engine.resume()
    engine.unpause()
    tokens, logprobs = ask(engine)
    expected_tokens, expected_logprobs = ask(tiny_engine(tiny_model()))
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-4)
