"""The openai package, of either major, against a server: python openai_client.py URL DIRECTORY."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import openai

KEY = "sesame"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
MESSAGES: Any = [{"role": "user", "content": "Hello"}]


def check_sync(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(
        model=model, prompt=["ab", "c"], max_tokens=8, n=2, seed=3, logprobs=2
    )
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.tokens) == 8 for choice in whole.choices)
    assert whole.usage.completion_tokens == 32
    with client.completions.create(
        model=model, prompt="ab", max_tokens=8, seed=3, stream=True
    ) as stream:
        text = "".join(chunk.choices[0].text for chunk in stream)
    alone = client.completions.create(model=model, prompt="ab", max_tokens=8, seed=3)
    assert text == alone.choices[0].text


def check_chat(client: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "messages": MESSAGES, "max_tokens": 12, "seed": 5}
    chat = client.chat.completions.create(
        **fields, logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True}
    )
    (choice,) = chat.choices
    assert len(choice.logprobs.content) == len(choice.token_ids) == 12
    assert chat.prompt_token_ids
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content
    assert chunks[-1].usage.completion_tokens == 12
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, max_completion_tokens=400, seed=5
    ) as events:
        kinds = {event.type for event in _until_length(events)}
    assert {"chunk", "content.delta"} <= kinds


def _until_length(events: Any) -> Any:
    """The events; the client raises at the end of an answer that was cut short."""
    try:
        yield from events
    except openai.LengthFinishReasonError:
        return


def check_tools(client: openai.OpenAI, model: str, call_id: int) -> None:
    fields: Any = {
        "model": model,
        "messages": MESSAGES,
        "tools": [TOOL],
        "max_tokens": 1,
        "logit_bias": {str(call_id): 100},
        "extra_body": {"stop_token_ids": [call_id], "include_stop_str_in_output": True},
    }
    (choice,) = client.chat.completions.create(**fields).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    deltas = [c.choices[0].delta for c in client.chat.completions.create(**fields, stream=True)]
    (made,) = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert made.function.name == "get_weather"


def check_errors(client: openai.OpenAI, model: str, url: str) -> None:
    def raised(kind: type[openai.APIStatusError], **fields: Any) -> str:
        try:
            client.completions.create(**({"model": model, "prompt": "a"} | fields))
        except kind as error:
            return str(error)
        raise AssertionError(f"{kind.__name__} was not raised")

    raised(openai.NotFoundError, model="another")
    raised(openai.BadRequestError, n=0)
    assert "maximum context length" in raised(openai.BadRequestError, max_tokens=100_000)
    try:
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
    except openai.AuthenticationError:
        return
    raise AssertionError("a wrong key was accepted")


async def check_async(url: str, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:

        async def one(seed: int) -> str:
            stream = await client.completions.create(
                model=model, prompt="ab", max_tokens=8, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(one(seed) for seed in range(20)))
        assert texts[3] == await one(3)
        # A stream that is left early.
        stream = await client.completions.create(
            model=model, prompt="ab", max_tokens=400, stream=True
        )
        async for _ in stream:
            break
        await stream.close()


def call_id_of(directory: str) -> int:
    """The token that is a whole tool call, so that a random model can make one."""
    tokenizer = json.loads(Path(directory, "tokenizer.json").read_text(encoding="utf-8"))
    calls = [each for each in tokenizer["added_tokens"] if "<tool_call>" in each["content"]]
    return calls[0]["id"]


def main(url: str, directory: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    (model,) = [each.id for each in client.models.list()]
    check_sync(client, model)
    check_chat(client, model)
    check_tools(client, model, call_id_of(directory))
    check_errors(client, model, url)
    asyncio.run(check_async(url, model))
    print(f"openai {openai.__version__}: passed")


if __name__ == "__main__":
    main(*sys.argv[1:3])
