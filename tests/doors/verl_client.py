"""verl's own registries, Ray actor and client over this engine on a CPU; run by verl's Python.

    PYTHON_WITH_VERL tests/doors/verl_client.py MODEL_DIRECTORY

Prints one JSON object with what was generated before and after an update.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import ray
import torch
import verl  # noqa: F401  (its plug-ins are loaded by this)
from omegaconf import OmegaConf
from safetensors.torch import load_file
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class
from verl.workers.rollout.router import GlobalRequestLoadBalancer

PROMPT = [5, 6, 7]
GREEDY = {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "logprobs": True}


@ray.remote
class Worker:
    """Stands for a trainer's worker: the replica asks it for its node."""


async def run(directory: str) -> dict[str, Any]:
    rollout = RolloutConfig(
        name="rollout",
        tensor_model_parallel_size=1,
        prompt_length=16,
        response_length=200,
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
        params = GREEDY | {"max_tokens": max_tokens}
        return await client.generate("r", prompt_ids=PROMPT, sampling_params=params)

    os.environ |= {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}
    # BaseRollout would make an HFModelConfig of what is a mapping here.
    adapter = get_rollout_class("rollout")(rollout, rollout, None)
    found: dict[str, Any] = {"address": replica.server_address}
    found["before"] = output_of(await generate(8))

    # Partial rollout: aborted, parked, and gone on with by verl's client.
    running = asyncio.ensure_future(generate(150))
    await asyncio.sleep(0.05)
    await replica.abort_all_requests()
    await adapter.update_weights(
        {n: t + 0.01 for n, t in load_file(f"{directory}/model.safetensors").items()}.items(),
        global_steps=7,
    )
    assert not running.done(), "its client waits for the generation to be resumed"
    await replica.resume_generation()
    found["across"] = output_of(await running)

    # A training step of a hybrid replica: memory away, weights back, KV back.
    await adapter.release()
    await adapter.resume(["weights"])

    async def tensors() -> Any:
        for name, tensor in load_file(f"{directory}/model.safetensors").items():
            yield name, tensor

    await adapter.update_weights(tensors(), global_steps=8)
    await adapter.resume(["kv_cache"])
    found["after"] = output_of(await generate(8))
    await replica.server_handle.shutdown.remote()
    return found


def output_of(output: Any) -> dict[str, Any]:
    return {
        "token_ids": output.token_ids,
        "log_probs": output.log_probs,
        "stop_reason": output.stop_reason,
        "extra_fields": output.extra_fields,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Ray would leave a token in the home directory, and a busy machine starts it slowly.
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "200"}
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
    print(json.dumps(asyncio.run(run(sys.argv[1]))))
