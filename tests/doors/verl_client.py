"""verl's registries, Ray actor and client over this engine: python verl_client.py URL DIRECTORY.

The plug-in is loaded by `import verl` alone. Its server must give the tokens and log-probs of the
HTTP server at URL. verl's losses are compared with those of trainer_hooks, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import urllib.request
from typing import Any

import ray
import torch
import verl  # noqa: F401  (its plug-ins are loaded by this)
import verl_losses  # beside this script
from omegaconf import OmegaConf
from safetensors.torch import load_file
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from rollout_verl.fields import NO_EFFECT, REFUSED, USED

PROMPT = [5, 6, 7]
SAMPLING = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": 3, "logprobs": True}
# Where the abort falls is left to chance, and so which weights would draw an end.
SAMPLING["ignore_eos"] = True


@ray.remote
class Worker:
    """Stands for a trainer's worker: the replica asks it for its node."""


async def run(url: str, directory: str) -> None:
    known = frozenset().union(USED, REFUSED, *NO_EFFECT.values())
    new = {field.name for field in dataclasses.fields(RolloutConfig)} - known
    assert not new, f"rollout_verl.fields has no decision on {sorted(new)}"
    rollout = RolloutConfig(
        name="rollout",
        tensor_model_parallel_size=1,
        prompt_length=16,
        response_length=400,
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=512,
        engine_kwargs={"rollout": {"buffer_size_gb": 0.02, "num_threads": 1}},
    )
    model = OmegaConf.create({"local_path": directory})
    replica = get_rollout_replica_class("rollout")(0, rollout, model, gpus_per_node=1)
    replica.rollout_mode, replica.workers = RolloutMode.HYBRID, [Worker.remote()]
    await replica.launch_servers()
    balancer = ray.remote(GlobalRequestLoadBalancer).remote({"0": replica.server_handle})
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "rollout"}}})
    client = FullyAsyncLLMServerClient(config, balancer)

    async def generate(max_tokens: int) -> Any:
        params = SAMPLING | {"max_tokens": max_tokens}
        return await client.generate("r", prompt_ids=PROMPT, sampling_params=params)

    os.environ |= {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}
    # BaseRollout would make an HFModelConfig of what is a mapping here.
    adapter = get_rollout_class("rollout")(rollout, rollout, None)
    before = await generate(8)
    token_ids, log_probs = over_http(url, 8)
    assert before.stop_reason == "length"  # by verl's client, which counts the tokens
    assert before.token_ids == token_ids, (before.token_ids, token_ids)
    torch.testing.assert_close(torch.tensor(before.log_probs), torch.tensor(log_probs))

    # Partial rollout: aborted, parked, and gone on with by verl's client.
    running = asyncio.ensure_future(generate(390))
    while not (await replica.server_handle.abort_all_requests.remote())["aborted_count"]:
        await replica.resume_generation()
        assert not running.done(), "it ended before it could be aborted"
        await asyncio.sleep(0.01)
    await adapter.update_weights(
        {n: t + 0.01 for n, t in load_file(f"{directory}/model.safetensors").items()}.items(),
        global_steps=7,
    )
    assert not running.done(), "its client waits for the generation to be resumed"
    await replica.resume_generation()
    across = await running
    assert len(across.token_ids) == len(across.log_probs) == 390
    assert across.token_ids[:1] == before.token_ids[:1]
    assert across.extra_fields["max_global_steps"] == 7

    # A training step of a hybrid replica: memory away, weights back, KV back.
    await adapter.release()
    await adapter.resume(["weights"])

    async def tensors() -> Any:
        for name, tensor in load_file(f"{directory}/model.safetensors").items():
            yield name, tensor

    await adapter.update_weights(tensors(), global_steps=8)
    await adapter.resume(["kv_cache"])
    after = await generate(8)
    assert after.token_ids == before.token_ids, "the first weights came back"
    assert after.extra_fields["global_steps"] == 8
    await replica.server_handle.shutdown.remote()


def over_http(url: str, max_tokens: int) -> tuple[list[int], list[float]]:
    """The tokens and log-probs of the HTTP server."""
    sampling = {"temperature": 1.0, "seed": 3, "max_tokens": max_tokens, "logprobs": 0}
    sampling["ignore_eos"] = True
    body = json.dumps({"token_ids": PROMPT, "sampling_params": sampling}).encode()
    request = urllib.request.Request(
        f"{url}/inference/v1/generate", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        (choice,) = json.load(reply)["choices"]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    verl_losses.main()
    # Ray would leave a token in the home directory, and a busy machine starts it slowly.
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "600"}
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
    asyncio.run(run(*sys.argv[1:3]))
    print("verl: passed")
