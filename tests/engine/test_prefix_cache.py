"""`num_cached_tokens` of requests, and what keeps requests apart in the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from rollout import InvalidRequestError, SamplingParams
from tests.tiny_models import drain, generate_all, prompt_of, tiny_engine, tiny_model

PROMPT = prompt_of(18)


@cache
def model() -> Any:
    return tiny_model(seed=6)


def engine_with_cache(of: Any = None, **config: Any) -> Any:
    return tiny_engine(
        of or model(),
        block_size_tokens=4,
        enable_prefix_caching=True,
        prefix_caching_eviction_policy="lru",
        **config,
    )


def num_cached(engine: Any, n: int = 1, **fields: Any) -> list[int | None]:
    """Return `num_cached_tokens` of each of n samples."""
    params = SamplingParams(num_tokens_to_generate=2, seed=4, **fields)
    engine.add_group(PROMPT, [params] * n)
    return [request.num_cached_tokens for request in drain(engine).values()]


def test_num_cached_tokens_counts_prompt_tokens_from_the_prefix_cache() -> None:
    engine = engine_with_cache()
    assert num_cached(engine) == [0]
    assert num_cached(engine, n=3) == [16, 16, 16]


def test_num_cached_tokens_of_forked_samples_is_that_of_their_prefill() -> None:
    assert num_cached(engine_with_cache(), n=3) == [0, 0, 0]


def test_num_cached_tokens_is_none_before_the_prefill() -> None:
    engine = engine_with_cache()
    request_id = engine.add_request(PROMPT, SamplingParams(num_tokens_to_generate=2))
    assert engine.abort_request(request_id).merge().num_cached_tokens is None


@pytest.mark.parametrize("across_versions", [False, True])
def test_requests_with_different_cache_salts_share_no_prefix(across_versions: bool) -> None:
    engine = engine_with_cache(prefix_reuse_across_versions=across_versions)
    salts = [None, "one", "two", None, "one", "two"]
    found = [num_cached(engine, cache_salt=salt) for salt in salts]
    assert found == [[0], [0], [0], [16], [16], [16]]


@pytest.mark.parametrize("salt", ["", 3])
def test_cache_salt_must_be_a_text(salt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        SamplingParams(cache_salt=salt)


@cache
def weights(seed: int = 6, *, is_finite: bool = True) -> dict[str, torch.Tensor]:
    tensors = {name: t.detach().clone() for name, t in tiny_model(seed=seed).state_dict().items()}
    if not is_finite:
        tensors["model.layers.0.self_attn.k_proj.weight"].fill_(torch.nan)
    return tensors


def fails_under_bad_weights(engine: Any) -> None:
    engine.add_request(PROMPT, SamplingParams(num_tokens_to_generate=2))
    (request,) = drain(engine).values()
    assert request.finish_reason == "error"


def leaves_after_its_first_chunk(engine: Any) -> None:
    """Nothing is sampled, so no check has seen the logits."""
    request_id = engine.add_request(PROMPT, SamplingParams(num_tokens_to_generate=2))
    engine.step()
    engine.abort_request(request_id)


def goes_on_under_good_weights(engine: Any) -> None:
    """Its second block has tokens of both weights."""
    request_id = engine.add_request(PROMPT, SamplingParams(num_tokens_to_generate=2))
    engine.step()
    engine.update_weights(weights(), in_flight=True)
    engine.step()
    engine.abort_request(request_id)


@pytest.mark.parametrize("across_versions", [False, True])
@pytest.mark.parametrize(
    "leave_kv", [fails_under_bad_weights, leaves_after_its_first_chunk, goes_on_under_good_weights]
)
def test_kv_of_non_finite_weights_reaches_no_request_under_later_weights(
    leave_kv: Callable[[Any], None], across_versions: bool
) -> None:
    fields = {"max_tokens": 6, "prefix_reuse_across_versions": across_versions}
    engine = engine_with_cache(reject_non_finite_weights=False, **fields)
    engine.update_weights(weights(is_finite=False), in_flight=True)
    leave_kv(engine)
    engine.update_weights(weights(7), in_flight=True)
    params = SamplingParams(num_tokens_to_generate=8, seed=4)
    requests = [generate_all(engine, [(PROMPT, params)])[0] for _ in range(2)]
    assert [request.num_cached_tokens for request in requests] == [0, 16]
    engine_of_good = engine_with_cache()
    engine_of_good.update_weights(weights(7), in_flight=True)
    (expected,) = generate_all(engine_of_good, [(PROMPT, params)])
    assert [r.generated_tokens for r in requests] == [expected.generated_tokens] * 2


def test_kv_that_is_found_non_finite_only_when_it_is_read_fails_one_request_at_most() -> None:
    overflowing = tiny_model(seed=6)  # as weights are for some prompts
    overflowing.load_state_dict(weights(is_finite=False))
    engine = engine_with_cache(overflowing, max_tokens=6, prefix_reuse_across_versions=True)
    leaves_after_its_first_chunk(engine)
    engine.update_weights(weights(), in_flight=True)
    reasons = []
    for _ in range(3):
        engine.add_request(PROMPT, SamplingParams(num_tokens_to_generate=2))
        reasons += [request.finish_reason for request in drain(engine).values()]
    assert reasons == ["error", "length", "length"]
