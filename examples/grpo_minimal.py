"""GRPO in one file: a tiny random model learns to count. Some seconds on a CPU."""

import random
from itertools import pairwise
from typing import Any

import torch
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


torch.manual_seed(0)
shape: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
heads: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
policy = Qwen3ForCausalLM(Qwen3Config(vocab_size=16, **shape, **heads))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
params = SamplingParams(
    num_tokens_to_generate=6, return_log_probs=True, logprobs_mode="temperature"
)

with LLM(policy, max_sequence_length=32, num_threads=1) as llm:
    weight_sync = WeightSync(llm)
    for step in range(NUM_STEPS):
        prompts = [[random.randrange(8)] for _ in range(NUM_PROMPTS)]
        with generation_phase(llm, weight_sync, policy):  # outside it the engine is suspended
            llm.submit(prompts, params, n=GROUP_SIZE)
            requests = [request for group in llm.collect() for request in group.requests]
        rewards = [reward([*r.prompt_tokens.tolist(), *r.generated_tokens]) for r in requests]
        batch = collate_rollouts(requests, rewards, train_version=llm.weights_version)
        advantages_PG = group_advantages(batch.rewards_B.view(NUM_PROMPTS, GROUP_SIZE))
        logprobs_BT = token_logprobs(policy(batch.tokens_BT).logits, batch.tokens_BT)
        loss, _ = policy_loss(
            logprobs_BT, batch.behaviour_logprobs_BT, advantages_PG.view(-1, 1), batch.mask_BT
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}  reward {batch.rewards_B.mean():.3f}  loss {loss.item():+.4f}")
