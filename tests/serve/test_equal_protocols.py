"""A seeded request gets the same tokens and log-probs in process and through every protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

from rollout import LLM, SamplingParams
from tests.rollout_verl.fake_verl import RolloutMode, fake_verl, rollout_config
from tests.serve import chat_model
from tests.serve.served import CONFIG, Served

pytestmark = pytest.mark.distributed

PROMPT = chat_model.tokenizer().encode("Of all colours ").ids
NUM_TOKENS, SEED = 12, 11
# SGLang's log-probs are those at the temperature, which are the raw ones at 1.
SHARED = {"temperature": 1.0, "seed": SEED, "max_tokens": NUM_TOKENS}
Sampled = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = chat_model.served_chat()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def expected() -> Sampled:
    params = SamplingParams(
        temperature=1.0, seed=SEED, num_tokens_to_generate=NUM_TOKENS, return_log_probs=True
    )
    with LLM(chat_model.directory(), None, CONFIG) as llm:
        request = llm.generate(PROMPT, params)
    return list(request.generated_tokens), request.generated_log_probs.tolist()


def choices_of(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The one choice of the answer, or its chunks."""
    if body.get("stream"):
        return [event["choices"][0] for event in served.events(path, body)]
    answer = served.post(path, body)
    assert answer.status == 200, answer.body
    return answer.json()["choices"]


def completions(served: Served, **more: Any) -> Sampled:
    body = {"prompt": PROMPT, "logprobs": 0, "return_token_ids": True, **SHARED, **more}
    parts = choices_of(served, "/v1/completions", body)
    ids = [i for part in parts for i in part.get("token_ids") or []]
    columns = [part["logprobs"]["token_logprobs"] for part in parts if part["logprobs"]]
    return ids, [value for values in columns for value in values]


def chat(served: Served, **more: Any) -> Sampled:
    body = {"prompt_token_ids": PROMPT, "logprobs": True, "return_token_ids": True}
    parts = choices_of(served, "/v1/chat/completions", body | SHARED | more)
    ids = [i for part in parts for i in part.get("token_ids") or []]
    return ids, content_log_probs(parts)


def tokens_in_out(served: Served, **more: Any) -> Sampled:
    body = {"token_ids": PROMPT, "sampling_params": SHARED | {"logprobs": 0}, **more}
    parts = choices_of(served, "/inference/v1/generate", body)
    return [i for part in parts for i in part["token_ids"]], content_log_probs(parts)


def content_log_probs(parts: list[dict[str, Any]]) -> list[float]:
    columns = [part["logprobs"]["content"] for part in parts if part["logprobs"]]
    return [entry["logprob"] for entries in columns for entry in entries]


def sglang(served: Served, **more: Any) -> Sampled:
    sampling = {"temperature": 1.0, "max_new_tokens": NUM_TOKENS, "sampling_seed": SEED}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, **more}
    if body.get("stream"):
        reply = served.events("/generate", body)[-1]
    else:
        reply = served.post("/generate", body).json()
    return reply["output_ids"], [row[0] for row in reply["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", [completions, chat, tokens_in_out, sglang])
def test_each_protocol_returns_the_tokens_and_log_probs_of_generate(
    served: Served, expected: Sampled, protocol: Callable[..., Sampled], stream: bool
) -> None:
    tokens, log_probs = protocol(served, stream=stream)
    assert tokens == expected[0]
    assert log_probs == pytest.approx(expected[1], abs=1e-5)


def test_verls_server_returns_the_tokens_and_log_probs_of_generate(expected: Sampled) -> None:
    async def generated() -> Any:
        kind = import_module("rollout_verl.server").EngineServer
        server = kind(rollout_config(), chat_model.directory(), RolloutMode.HYBRID)
        await server.launch()
        try:
            return await server.generate(PROMPT, SHARED | {"logprobs": True}, "name")
        finally:
            await server.shutdown()

    with fake_verl():
        output = asyncio.run(generated())
    assert output.token_ids == expected[0]
    assert output.log_probs == pytest.approx(expected[1], abs=1e-5)
