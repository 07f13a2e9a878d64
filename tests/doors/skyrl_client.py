"""SkyRL's RemoteInferenceClient against a server: python skyrl_client.py URL DIRECTORY ROOT.

Its modules name torch in annotations alone: that is stubs/torch.py.
"""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "stubs"))

import aiohttp
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    PauseMode,
    RemoteInferenceClient,
)

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
SAMPLING = {"max_tokens": 9, "temperature": 1.0, "logprobs": 0, "seed": 3}


async def generated(client: RemoteInferenceClient) -> list[list[int]]:
    batch = {
        "prompt_token_ids": PROMPTS,
        "sampling_params": SAMPLING,
        "session_ids": ["a", "b"],
        "cache_salt": "1",
    }
    output = await client.generate(batch)
    assert output["stop_reasons"] == ["length", "length"]
    assert all(isinstance(text, str) for text in output["responses"])
    for ids, log_probs in zip(output["response_ids"], output["response_logprobs"], strict=True):
        assert len(ids) == len(log_probs) == 9
        assert all(map(math.isfinite, log_probs))
    return output["response_ids"]


async def check_sample(client: RemoteInferenceClient) -> None:
    """The form of Tinker, with log-probs of the prompt."""
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPTS[0]}]},
        "num_samples": 2,
        "sampling_params": {"temperature": 1.0, "max_tokens": 4, "seed": 5},
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
    }
    reply = await client.sample({"json": body})
    assert [len(sequence["tokens"]) for sequence in reply["sequences"]] == [4, 4]
    assert [len(sequence["logprobs"]) for sequence in reply["sequences"]] == [4, 4]
    assert len(reply["prompt_logprobs"]) == len(reply["topk_prompt_logprobs"]) == 3


async def check_texts(client: RemoteInferenceClient) -> None:
    (ids,) = await client.tokenize(["Hello"])
    assert await client.detokenize([ids]) == ["Hello"]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "session_id": "a"}
    assert (await client.chat_completion({"json": chat}))["usage"]["completion_tokens"] == 5
    text = {"prompt": "Hello", "max_tokens": 5}
    assert (await client.completion({"json": text}))["usage"]["completion_tokens"] == 5
    refusal = None
    try:
        await client.completion({"json": {"prompt": "Hello", "max_tokens": 10**6}})
    except aiohttp.ClientResponseError as error:
        refusal = error
    assert refusal is not None
    assert refusal.status == 400
    assert "maximum context length" in refusal.message


async def check_control(client: RemoteInferenceClient, expected: list[list[int]]) -> None:
    assert await client.get_world_size() == (1, 1)
    for mode in (PauseMode.KEEP, PauseMode.ABORT, PauseMode.WAIT):
        await client.pause(mode)
        await client.resume()
    await client.pause_generation()
    frozen = asyncio.ensure_future(generated(client))
    await asyncio.sleep(0.2)
    assert not frozen.done()
    await client.resume_generation()
    assert await frozen == expected
    await client.reset_prefix_cache(reset_running_requests=True)
    await client.sleep(level=1)
    assert await client.is_sleeping()
    await client.wake_up(tags=["weights"])
    await client.wake_up(tags=["kv_cache"])
    assert not await client.is_sleeping()
    assert await generated(client) == expected


async def run(url: str) -> None:
    async with RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="model"
    ) as client:
        expected = await generated(client)
        await check_sample(client)
        await check_texts(client)
        await check_control(client, expected)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
    print("skyrl: passed")
