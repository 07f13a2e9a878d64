"""The load of `rollout bench`, and `measure_serving`, which runs it against a server.

Used by `rollout.cli.bench` and `benchmarks.serving`. `measure_serving` sends HTTP requests for
streamed completions and times them.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from rollout.cli.http_faults import named_http_faults, server_root
from rollout.cli.measurements import Summary, Timing
from rollout.cli.settings import UsageError
from rollout.errors import RolloutError
from rollout.ranges import Name, PositiveFloat, PositiveInt, PositiveSeconds, check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """Prompts of random ids in [1, max_token_id]. Raises UsageError for a number below 1.

    prompt_tokens: length of each prompt.
    num_tokens: tokens that each request generates."""

    num_prompts: PositiveInt = 64
    prompt_tokens: PositiveInt = 128
    num_tokens: PositiveInt = 128
    max_token_id: PositiveInt = 100

    def __post_init__(self) -> None:
        check_fields(self, UsageError)

    def prompts(self) -> list[list[int]]:
        """Return the token ids of the prompts, which are the same in each run."""
        generator = np.random.default_rng(0)
        shape = (self.num_prompts, self.prompt_tokens)
        ids: list[list[int]] = generator.integers(1, self.max_token_id + 1, shape).tolist()
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLoad(BenchLoad):
    """The requests of a run against a server. Raises UsageError for a field that is not valid.

    num_prompts: number of requests.
    prompt_tokens: length of each prompt.
    num_tokens: tokens that each request generates.
    max_token_id: prompts are random ids from 1 to this one.

    url: URL of an OpenAI-compatible server, such as http://127.0.0.1:8000.
    model: name of the model. None takes the first model that the server lists.
    api_key: bearer token; better in the variable ROLLOUT_API_KEY.
    concurrency: most requests at once.
    rate: mean number of requests started per second, at random times. None starts a request
        whenever another one ends.
    timeout_s: most seconds of one request."""

    url: Name
    model: Name | None = None
    api_key: Name | None = None
    concurrency: PositiveInt = 32
    rate: PositiveFloat | None = None
    timeout_s: PositiveSeconds = 600.0

    def __post_init__(self) -> None:
        BenchLoad.__post_init__(self)
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(
                f"url={self.url} must begin with http:// or https://, such as http://{self.url}"
            )


async def measure_serving(load: ServingLoad) -> Summary:
    """Send all requests, wait for the last one, and return the measurements. A failed request is
    counted and raises nothing. If `load` names no model, raises RolloutError if the server cannot
    be reached or lists no model."""
    headers = {} if load.api_key is None else {"Authorization": f"Bearer {load.api_key}"}
    async with aiohttp.ClientSession(
        base_url=server_root(load.url),
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=load.timeout_s),
        read_bufsize=2**22,  # a line of a stream must fit
    ) as session:
        with named_http_faults(load.url):
            model = load.model or await _first_model(session)
        prompts = load.prompts()
        gaps_s = np.random.default_rng(1).exponential(1 / (load.rate or 1.0), load.num_prompts)
        slots = asyncio.Semaphore(load.concurrency)

        async def one(prompt: list[int]) -> Timing | str:
            async with slots:
                return await _complete(session, model, prompt, load.num_tokens)

        start = time.perf_counter()
        tasks = []
        for prompt, gap_s in zip(prompts, gaps_s, strict=True):
            tasks.append(asyncio.ensure_future(one(prompt)))
            if load.rate is not None:
                await asyncio.sleep(gap_s)
        ended = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - start
    return Summary.of(
        [timing for timing in ended if isinstance(timing, Timing)],
        errors=[error for error in ended if isinstance(error, str)],
        seconds=seconds,
    )


async def _first_model(session: aiohttp.ClientSession) -> str:
    async with session.get("v1/models") as response:
        if response.status != 200:
            text = await response.text()
            raise RolloutError(f"GET /v1/models answered {response.status}: {text[:200]}")
        models = (await response.json())["data"]
    if not models:
        raise RolloutError("the server lists no model; give model=NAME")
    return str(models[0]["id"])


async def _complete(
    session: aiohttp.ClientSession, model: str, prompt: list[int], num_tokens: int
) -> Timing | str:
    """Return the timing of one streamed completion, or the message of its error."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first_s = last_s = 0.0
    usage: dict[str, Any] | None = None
    try:
        async with session.post("v1/completions", json=body) as response:
            if response.status != 200:
                return f"status {response.status}: {(await response.text())[:200]}"
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[len(b"data: ") :])
                if "error" in chunk:
                    return str(chunk["error"])
                if chunk["choices"]:
                    last_s = time.perf_counter() - start
                    first_s = first_s or last_s
                usage = chunk.get("usage") or usage
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    if usage is None or not first_s:
        return "the stream ended without usage"
    return Timing(
        num_prompt_tokens=usage["prompt_tokens"],
        num_generated_tokens=usage["completion_tokens"],
        first_token_s=first_s,
        total_s=last_s,
    )
