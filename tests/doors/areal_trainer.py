"""AReaL's RemoteInfEngine against a server: python areal_trainer.py URL DIRECTORY ROOT.

This process is the trainer: rank 0 of the gloo group that AReaL makes on a CPU.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import torch
import torch.distributed as dist
from areal.api.alloc_mode import ModelAllocation
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.api.io_struct import ModelRequest, ParamSpec, WeightUpdateMeta
from areal.engine.core.distributed import init_custom_process_group
from areal.engine.sglang_remote import SGLangBackend
from areal.infra.remote_inf_engine import RemoteInfEngine
from transformers import AutoModelForCausalLM

GROUP = "update_weight_group"
PROMPT = [5, 6, 7, 8]


def main(url: str, directory: str, root: str) -> None:
    policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    config = InferenceEngineConfig(
        experiment_name="doors", trial_name="one", max_concurrent_rollouts=4, consumer_batch_size=2
    )
    engine = RemoteInfEngine(config, SGLangBackend())
    engine.initialize(engine_id="0", addr=[url.removeprefix("http://")], train_data_parallel_size=1)
    try:
        check_generation(engine, policy)
        check_scores(engine, policy)
        update_over_gloo(engine, policy)
        check_generation(engine, policy)
        check_scores(engine, policy)
    finally:
        engine.destroy()
    print("areal: passed")


def log_probs_of(policy: torch.nn.Module, sequence: list[int], temperature: float) -> list[float]:
    """Log-probs of all tokens but the first."""
    with torch.no_grad():
        rows = (policy(torch.tensor([sequence])).logits[0] / temperature).log_softmax(-1)
    return [rows[i, token].item() for i, token in enumerate(sequence[1:])]


def check_generation(engine: RemoteInfEngine, policy: torch.nn.Module) -> None:
    sampling = GenerationHyperparameters(max_new_tokens=8, temperature=0.7)
    request = ModelRequest(input_ids=PROMPT, gconfig=sampling)
    reply = asyncio.run(engine.agenerate(request))
    assert len(reply.output_tokens) == 8
    expected = log_probs_of(policy, PROMPT + reply.output_tokens, 0.7)[len(PROMPT) - 1 :]
    close(reply.output_logprobs, expected)


def check_scores(engine: RemoteInfEngine, policy: torch.nn.Module) -> None:
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1]])
    (scores,) = engine.compute_logp([{"input_ids": ids, "loss_mask": mask}])
    close(scores[0, 3:].tolist(), log_probs_of(policy, ids[0].tolist(), 1.0)[2:])


def update_over_gloo(engine: RemoteInfEngine, policy: torch.nn.Module) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meta = WeightUpdateMeta(
        type="xccl",
        gen_allocation=ModelAllocation.from_str("sglang:d1"),
        nccl_master_address="127.0.0.1",
        nccl_master_port=port,
        nccl_group_name=GROUP,
    )
    joined = engine.init_weights_update_group(meta)
    group = init_custom_process_group(
        backend="gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=2,
        rank=0,
        group_name=GROUP,
    )
    joined.result(timeout=120)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.05)
    named = list(policy.named_parameters())
    engine.pause_generation()
    for part in (named[:5], named[5:]):
        specs = [
            ParamSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in part
        ]
        received = engine.update_weights_from_distributed(meta, specs)
        for _, tensor in part:
            dist.broadcast(tensor.detach(), src=0, group=group)
        received.result(timeout=120)
    engine.continue_generation()


def close(given: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(given), torch.tensor(expected), atol=1e-3, rtol=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
