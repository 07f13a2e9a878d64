"""What requests say of the prefix cache, and what keeps them apart in it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from rollout import InvalidRequestError, SamplingParams
from tests.tiny_models import drain, prompt_of, tiny_engine, tiny_model

PROMPT = prompt_of(18)


@cache
def model() -> Any:
    return tiny_model(seed=6)


def engine_with_cache(**config: Any) -> Any:
    return tiny_engine(
        model(),
        block_size_tokens=4,
        enable_prefix_caching=True,
        prefix_caching_eviction_policy="lru",
        **config,
    )


def num_cached(engine: Any, n: int = 1, **fields: Any) -> list[int | None]:
    """Of each of n samples."""
    params = SamplingParams(num_tokens_to_generate=2, seed=4, **fields)
    engine.add_group(PROMPT, [params] * n)
    return [request.num_cached_tokens for request in drain(engine).values()]


def test_a_request_knows_how_much_of_its_prompt_was_cached() -> None:
    engine = engine_with_cache()
    assert num_cached(engine) == [0]
    assert num_cached(engine, n=3) == [16, 16, 16]


def test_samples_that_share_a_prefill_found_nothing_in_the_cache() -> None:
    assert num_cached(engine_with_cache(), n=3) == [0, 0, 0]


def test_a_request_that_never_ran_does_not_know() -> None:
    engine = engine_with_cache()
    request_id = engine.add_request(PROMPT, SamplingParams(num_tokens_to_generate=2))
    assert engine.abort_request(request_id).merge().num_cached_tokens is None


@pytest.mark.parametrize("across_versions", [False, True])
def test_requests_of_other_salts_share_no_prefix(across_versions: bool) -> None:
    engine = engine_with_cache(prefix_reuse_across_versions=across_versions)
    salts = [None, "one", "two", None, "one", "two"]
    found = [num_cached(engine, cache_salt=salt) for salt in salts]
    assert found == [[0], [0], [0], [16], [16], [16]]


@pytest.mark.parametrize("salt", ["", 3])
def test_a_salt_is_a_text(salt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        SamplingParams(cache_salt=salt)
