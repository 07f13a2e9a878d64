"""Asynchronous GRPO: a tiny random model learns to count.

python examples/async_minimal.py [--in-process] [--suspend]

--in-process runs the engine in this process. --suspend suspends the engine while the trainer works.
`benchmarks.staleness_bound` uses `reward` and `ENGINE`.
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout import LLM, AsyncLLM
from trainer_hooks import (
    AsyncRolloutProducer,
    ThreadedLLM,
    WeightSync,
    generation_phase,
    group_advantages,
    policy_loss,
    token_logprobs,
)

BATCH_GROUPS, GROUP_SIZE, NUM_STEPS = 16, 8, 40
# Rollouts end with the longest sequence: a prompt of one token and six more.
ENGINE: dict[str, Any] = dict(max_sequence_length=7, num_threads=1)


def reward(
    prompts: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]
) -> list[float]:
    """Return each rollout's fraction of generated tokens that equal the token before plus 1."""
    rollouts = [[*prompt, *ids] for prompt, ids in zip(prompts, completion_ids, strict=True)]
    return [sum(b == a + 1 for a, b in pairwise(r)) / (len(r) - 1) for r in rollouts]


async def train(llm: AsyncLLM | ThreadedLLM, policy: Qwen3ForCausalLM, suspend: bool) -> None:
    """Train `policy`. The engine meanwhile generates the next batch, or is idle if `suspend`."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    weight_sync, prompts = WeightSync(llm, in_flight=not suspend), [[token] for token in range(8)]
    async with AsyncRolloutProducer(
        llm, prompts, reward, GROUP_SIZE, BATCH_GROUPS, max_staleness_versions=1
    ) as producer:
        for step in range(NUM_STEPS):
            async with generation_phase(llm) if suspend else nullcontext():
                batch = await anext(producer)
            rows = batch.rollouts
            advantages_PG = group_advantages(rows.rewards_B.view(-1, GROUP_SIZE))
            logprobs_BT = token_logprobs(policy(rows.tokens_BT).logits, rows.tokens_BT)
            loss, _ = policy_loss(
                logprobs_BT, rows.behaviour_logprobs_BT, advantages_PG.view(-1, 1), rows.mask_BT
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            await weight_sync.apush(policy)
            lag = rows.policy_lag_BT[rows.mask_BT].float().mean()
            print(f"step {step}  reward {rows.rewards_B.mean():.3f}  versions behind {lag:.2f}")


async def main(in_process: bool = False, suspend: bool = False) -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    heads: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    policy = Qwen3ForCausalLM(Qwen3Config(vocab_size=16, **shape, **heads))
    if in_process:
        with LLM(policy, **ENGINE) as direct:
            async with ThreadedLLM(direct) as threaded:
                await train(threaded, policy, suspend)
    else:
        async with AsyncLLM(policy, **ENGINE) as llm:
            await train(llm, policy, suspend)


if __name__ == "__main__":
    asyncio.run(main("--in-process" in sys.argv, "--suspend" in sys.argv))
