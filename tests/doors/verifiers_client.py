"""verifiers with renderers against a server: python verifiers_client.py URL DIRECTORY ROOT.

Its training client renders chats to token ids and calls /inference/v1/generate. A second turn
must go on from the very ids of the first; its evaluation client relays chat completions.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ["ROLLOUT_KEY"] = "sesame"
os.environ["HF_HUB_OFFLINE"] = "1"

import verifiers.v1 as vf
from renderers import Qwen3RendererConfig
from two_turn_env import TwoTurnConfig, TwoTurnEnv
from verifiers.v1.clients import EvalClientConfig, ModelContext, TrainClientConfig

MAX_TOKENS = 12
# Tokens of Qwen3's template that a model of bytes lacks; without tools no prompt has them.
QWEN_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "</think>")


def renderer_directory(directory: str, root: str) -> str:
    """The model's tokenizer with the tokens that renderers wants of a Qwen3."""
    copy = Path(root, "renderer")
    shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    path = copy / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    added = tokenizer["added_tokens"]
    for token in QWEN_TOKENS:
        next_id = max(each["id"] for each in added) + 1
        added.append(added[0] | {"id": next_id, "content": token})
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return str(copy)


async def traces_of(client: Any) -> list[vf.Trace]:
    """One trace for each task of the environment."""
    env = TwoTurnEnv(TwoTurnConfig(taskset={"id": "two_turn_env"}))
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=MAX_TOKENS, seed=3)
    ctx = ModelContext(model="model", client=client, sampling=sampling)
    async with env.serving():
        episodes = await asyncio.gather(*(env.run_episode(task, ctx) for task in env.taskset))
    for episode in episodes:
        assert episode.ok, [*episode.errors, *(t.errors for t in episode.traces)]
    return [trace for episode in episodes for trace in episode.traces]


def check_ids(trace: vf.Trace) -> None:
    """One branch, whose sampled ids are those that the server has drawn, with their log-probs."""
    (branch,) = trace.branches  # a second turn that was rendered anew would fork it
    replies = [node for node in branch.nodes if any(node.mask)]
    assert len(replies) == trace.num_turns == 2
    for node in replies:
        sampled = [i for i, is_sampled in zip(node.token_ids, node.mask, strict=True) if is_sampled]
        assert 1 <= len(sampled) <= MAX_TOKENS
        assert len(node.logprobs) == len(sampled)
    assert sum(branch.sampled_mask) == sum(len(node.logprobs) for node in replies)
    assert all(map(math.isfinite, branch.logprobs))
    assert len(branch.logprobs) == len(branch.token_ids)


def main(url: str, directory: str, root: str) -> None:
    endpoint: Any = {"base_url": f"{url}/v1", "api_key_var": "ROLLOUT_KEY"}
    train = TrainClientConfig(
        **endpoint,
        renderer=Qwen3RendererConfig(thinking_retention="all"),
        renderer_model_name=renderer_directory(directory, root),
    )
    for trace in asyncio.run(traces_of(train)):
        check_ids(trace)
    for trace in asyncio.run(traces_of(EvalClientConfig(**endpoint))):
        assert trace.num_turns == 2
    print("verifiers: passed")


if __name__ == "__main__":
    main(*sys.argv[1:4])
