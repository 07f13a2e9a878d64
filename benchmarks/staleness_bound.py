"""Reward under several staleness bounds: fixed bounds, and one that follows the ESS.

    python benchmarks/staleness_bound.py

A program, run by hand. Each run solves the counting problem of examples/async_minimal.py, with the
producer and the engine in one process. For each seed, all bounds have the same initial weights,
prompts and number of steps. ESS is the effective sample size of a batch. The program prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.one_thread import restart_with_one_thread
from examples.async_minimal import ENGINE, reward
from rollout import LLM
from trainer_hooks import (
    AsyncRolloutProducer,
    ThreadedLLM,
    WeightSync,
    group_advantages,
    policy_loss,
    token_logprobs,
)

Bound = int | Literal["ess"]
BOUNDS: tuple[Bound, ...] = (0, 1, 4, "ess")
BATCH_GROUPS, GROUP_SIZE, WINDOW_STEPS = 16, 8, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Means over all steps of a run.

    reward_last: mean reward of the last WINDOW_STEPS steps.
    lag: policy lag of the trained tokens, in weight versions.
    ess: effective sample size, as a fraction of the batch.
    bound: staleness bound in force, in weight versions.
    """

    reward_mean: float
    reward_last: float
    lag: float
    ess: float
    bound: float


async def train(bound: Bound, seed: int, num_steps: int, learning_rate: float) -> Run:
    """Train `num_steps` steps, and return the run's means. `seed` sets the initial weights."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    heads: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    policy = Qwen3ForCausalLM(Qwen3Config(vocab_size=16, **shape, **heads))
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    rows, prompts = [], [[token] for token in range(8)]
    with LLM(policy, **ENGINE) as direct:
        async with (
            ThreadedLLM(direct) as llm,
            AsyncRolloutProducer(
                llm, prompts, reward, GROUP_SIZE, BATCH_GROUPS, bound, seed=seed
            ) as producer,
        ):
            weight_sync = WeightSync(llm, in_flight=True)
            for _ in range(num_steps):
                batch = await anext(producer)
                rollouts = batch.rollouts
                advantages_PG = group_advantages(rollouts.rewards_R.view(-1, GROUP_SIZE))
                logits_BTV = policy(rollouts.tokens_BT).logits
                loss, metrics = policy_loss(
                    token_logprobs(logits_BTV, rollouts.tokens_BT),
                    rollouts.behaviour_logprobs_BT,
                    advantages_PG.view(-1, 1),
                    rollouts.mask_BT,
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ess, lag_BT = metrics["eff_sample_size"], rollouts.policy_lag_BT
                in_force = producer.max_staleness_versions
                lag = float(lag_BT[rollouts.mask_BT].float().mean())
                rows.append((float(rollouts.rewards_R.mean()), lag, ess, in_force))
                producer.observe_effective_sample_size(ess)
                await weight_sync.apush(policy)
    rewards, lags, sizes, bounds = zip(*rows, strict=True)
    return Run(
        reward_mean=fmean(rewards),
        reward_last=fmean(rewards[-WINDOW_STEPS:]),
        lag=fmean(lags),
        ess=fmean(sizes),
        bound=fmean(bounds),
    )


def _bound(text: str) -> Bound:
    return "ess" if text == "ess" else int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every bound with every seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bounds", nargs="+", default=BOUNDS, type=_bound)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    given = parser.parse_args(arguments)
    runs: dict[Bound, list[Run]] = {bound: [] for bound in given.bounds}
    for seed in given.seeds:
        for bound, own in runs.items():
            own.append(asyncio.run(train(bound, seed, given.steps, given.learning_rate)))
    print("| bound | reward, all steps | last 5 | lowest seed | mean lag | mean ESS | mean bound |")
    print("|---|---|---|---|---|---|---|")
    for bound, own in runs.items():
        cells = [
            fmean(run.reward_mean for run in own),
            fmean(run.reward_last for run in own),
            min(run.reward_last for run in own),
            fmean(run.lag for run in own),
            fmean(run.ess for run in own),
            fmean(run.bound for run in own),
        ]
        print(f"| {bound} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")


if __name__ == "__main__":
    restart_with_one_thread()
    main()
