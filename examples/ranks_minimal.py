"""GRPO where the processes of an FSDP2 trainer are the ranks of one engine, on a CPU.

torchrun --standalone --nproc-per-node 2 examples/ranks_minimal.py
"""

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout import LLM, SamplingParams
from trainer_hooks import (
    WeightSync,
    collate_rollouts,
    generation_phase,
    group_advantages,
    policy_loss,
    token_logprobs,
)

NUM_PROMPTS, GROUP_SIZE, NUM_STEPS = 16, 8, 40


def reward(tokens: list[int]) -> float:
    """Return the fraction of tokens after the first that equal the token before plus 1."""
    return sum(b == a + 1 for a, b in pairwise(tokens)) / (len(tokens) - 1)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
pg_collection = SimpleNamespace(tp=dist.group.WORLD)  # or Megatron's ProcessGroupCollection
torch.manual_seed(0)
random.seed(0)  # all ranks draw the same prompts
shape: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
heads: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
policy = Qwen3ForCausalLM(Qwen3Config(vocab_size=16, **shape, **heads))
llm = LLM(policy, max_sequence_length=32, num_threads=1, pg_collection=pg_collection)
fully_shard(policy)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
params = SamplingParams(
    num_tokens_to_generate=6, return_log_probs=True, logprobs_mode="temperature"
)

with llm:
    weight_sync = WeightSync(llm)
    for step in range(NUM_STEPS):
        prompts = [[random.randrange(8)] for _ in range(NUM_PROMPTS)]
        with generation_phase(llm, weight_sync, policy):  # all ranks enter, and gather
            llm.submit(prompts, params, n=GROUP_SIZE)
            requests = [request for group in llm.collect() for request in group.requests]
        rewards = [reward([*r.prompt_tokens.tolist(), *r.generated_tokens]) for r in requests]
        batch = collate_rollouts(requests, rewards, train_version=llm.weights_version)
        advantages_PG = group_advantages(batch.rewards_B.view(NUM_PROMPTS, GROUP_SIZE))
        own = slice(rank, None, size)  # all ranks have the batch, and each trains on a part
        tokens_BT = batch.tokens_BT[own]
        logprobs_BT = token_logprobs(policy(tokens_BT).logits, tokens_BT)
        loss, _ = policy_loss(
            logprobs_BT,
            batch.behaviour_logprobs_BT[own],
            advantages_PG.view(-1, 1)[own],
            batch.mask_BT[own],
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}  reward {batch.rewards_B.mean():.3f}  loss {loss.item():+.4f}")
dist.destroy_process_group()
