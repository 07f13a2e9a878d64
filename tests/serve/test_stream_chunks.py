"""Chunks of streams have usage only on request, and no null keys."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.served import Served

pytestmark = pytest.mark.distributed

PROMPT = list(range(40, 52))
SAMPLING = {"max_tokens": 6, "seed": 3, "ignore_eos": True}
PATHS = {
    "/v1/completions": {"prompt": [PROMPT, PROMPT[:5]], "n": 2, **SAMPLING},
    "/v1/chat/completions": {"prompt_token_ids": PROMPT, "n": 2, **SAMPLING},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"n": 2, **SAMPLING}},
}


@pytest.fixture(scope="module")
def served(chat_server: Served) -> Served:
    return chat_server


def chunks(served: Served, path: str, **body: Any) -> list[Any]:
    return served.events(path, PATHS[path] | {"stream": True} | body)


@pytest.mark.parametrize("path", PATHS)
def test_continuous_usage_stats_count_the_tokens_so_far_in_every_chunk(
    served: Served, path: str
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = chunks(served, path, stream_options=options)
    latest: dict[int, int] = {}
    for part in parts:
        (choice,), usage = part["choices"], part["usage"]
        index, num_tokens = choice["index"], usage["completion_tokens"]
        num_new = len(choice.get("token_ids") or [])
        if path != "/inference/v1/generate":
            num_new = num_tokens - latest.get(index, 0)
        assert num_tokens == latest.get(index, 0) + num_new
        latest[index] = num_tokens
        is_second_prompt = path == "/v1/completions" and index >= 2
        assert usage["prompt_tokens"] == (5 if is_second_prompt else 12)
        assert usage["total_tokens"] == usage["prompt_tokens"] + num_tokens
        if choice.get("delta", {}).get("role"):
            assert num_tokens == 0, "the first chunk has no token yet"
    assert set(latest.values()) == {6}
    assert last["usage"]["completion_tokens"] == 6 * len(latest)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options",
    [None, {"include_usage": True}, {"continuous_usage_stats": True}],
)
def test_chunks_have_no_usage_unless_it_is_asked_for(
    served: Served, path: str, options: dict[str, bool] | None
) -> None:
    parts = chunks(served, path, stream_options=options)
    parts = parts[:-1] if options == {"include_usage": True} else parts
    assert all(part["choices"] and "usage" not in part for part in parts)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_asked", [False, True])
def test_no_chunk_has_token_ids_of_null(served: Served, path: str, is_asked: bool) -> None:
    parts = chunks(served, path, return_token_ids=is_asked)
    choices = [choice for part in parts for choice in part["choices"]]
    assert None not in [choice.get("token_ids", []) for choice in choices]
    assert None not in [each.get("prompt_token_ids", []) for each in [*parts, *choices]]
    num_ids = sum(len(choice.get("token_ids", [])) for choice in choices)
    is_given = is_asked or path == "/inference/v1/generate"
    assert num_ids == (6 * len({choice["index"] for choice in choices}) if is_given else 0)
