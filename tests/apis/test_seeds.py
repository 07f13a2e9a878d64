"""Requests without a seed: each engine draws other noise, and the `seed` of an LLM repeats a
run."""

from __future__ import annotations

import logging
from functools import partial
from itertools import combinations
from typing import Any

import httpx
import pytest

from rollout import LLM, SamplingParams, ServeConfig
from tests.apis.fleets import CONFIG, directory
from tests.tiny_models import prompt_of

PROMPTS = [prompt_of(6), prompt_of(9)]
PARAMS = SamplingParams(num_tokens_to_generate=12, ignore_eos=True)
KINDS = [
    pytest.param({}, id="in-process"),
    pytest.param({"use_coordinator": True}, id="fleet", marks=pytest.mark.distributed),
]


def drawn(options: dict[str, Any], *, num_calls: int = 1) -> tuple[int, list[list[int]]]:
    """The seed of a new LLM, and the tokens of its first requests."""
    with LLM(directory(), None, CONFIG, **options) as llm:
        calls = [llm.generate(PROMPTS, PARAMS, n=2) for _ in range(num_calls)]
        return llm.seed, [list(r.generated_tokens) for call in calls for r in call]


@pytest.mark.parametrize("options", KINDS)
def test_llm_without_a_seed_draws_one_and_seed_repeats_it(
    options: dict[str, Any],
) -> None:
    runs = [drawn(options, num_calls=2) for _ in range(2)]
    tokens = [tuple(each) for _, run in runs for each in run]
    assert len(set(tokens)) == len(tokens), "no completion of one equals another's"
    seed, first = runs[0]
    assert drawn({**options, "seed": seed}, num_calls=2) == (seed, first)


@pytest.mark.parametrize("options", KINDS)
def test_drawn_seed_is_logged(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rollout")
    seed, _ = drawn(options)
    assert f"seed={seed} was drawn" in caplog.text
    caplog.clear()
    drawn({**options, "seed": seed})
    assert "was drawn" not in caplog.text


def test_served_llm_repeats_no_earlier_request() -> None:
    def served(llm: LLM) -> list[list[int]]:
        llm.serve(ServeConfig(port=0), blocking=False)
        try:
            assert llm.serving_address is not None
            host, port = llm.serving_address
            post = partial(httpx.post, f"http://{host}:{port}/v1/completions", timeout=60.0)
            fields = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
            replies = [post(json={"prompt": prompt, **fields}) for prompt in PROMPTS]
            return [reply.json()["choices"][0]["token_ids"] for reply in replies]
        finally:
            llm.stop_serving()

    def run(seed: int) -> list[list[int]]:
        with LLM(directory(), None, CONFIG, seed=seed) as llm:
            own = [list(r.generated_tokens) for r in llm.generate(PROMPTS, PARAMS)]
            return [*own, *served(llm), *served(llm)]

    tokens = run(5)
    for one, other in combinations(tokens, 2):
        assert one != other
    assert run(5) == tokens
