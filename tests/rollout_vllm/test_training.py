"""GRPO over a fleet of two engines of vLLM. One engine is killed, one stands still, one joins late,
and at the end the coordinator is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.async_minimal import reward
from rollout import AsyncLLM
from rollout.errors import CoordinatorLostError
from tests.apis.fleets import until
from tests.apis.leftovers import fleet_pids
from tests.apis.shells import shell
from tests.contracts.vllm_engines import BLOCK_SIZE, HAS_VLLM, SHAPE
from tests.tiny_models import IS_LONG
from trainer_hooks import (
    AsyncRolloutProducer,
    WeightSync,
    group_advantages,
    policy_loss,
    token_logprobs,
)

if not HAS_VLLM:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

NUM_STEPS, BATCH_GROUPS, GROUP_SIZE, BOUND = 40, 16, 8, 1
KILL_AT, STOP_AT, CONTINUE_AT, JOIN_AT, JOINED_AT = 8, 14, 18, 22, 30
CONFIG: dict[str, Any] = {
    "engine": "vllm",
    "engine_options": {"num_gpu_blocks_override": 80},
    "max_sequence_length": 7,  # a prompt of one token, and six more
    "max_requests": 64,
    "block_size_tokens": BLOCK_SIZE,
    "dtype": "float32",
    "device": "cpu",
    "max_kv_staleness_versions": BOUND,
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3 if IS_LONG else 1))
def test_grpo_over_two_vllm_engines_learns_through_faults(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = asyncio.run(train(seed, tmp_path))
    with capsys.disabled():
        print(f"\nseed {seed}: {report}")


async def train(seed: int, directory: Path) -> str:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    policy = Qwen3ForCausalLM(Qwen3Config(**sizes, **SHAPE, eos_token_id=None))
    policy.save_pretrained(directory)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    rewards: list[float] = []
    ages: Counter[int] = Counter()
    lags: Counter[int] = Counter()
    seen: set[Any] = set()
    async with AsyncLLM(directory, data_parallel_size=2, seed=seed, **CONFIG) as llm:
        weight_sync = WeightSync(llm, in_flight=True)
        prompts = [[token] for token in range(8)]
        async with (
            faults(llm, directory) as cause,
            AsyncRolloutProducer(
                llm, prompts, reward, GROUP_SIZE, BATCH_GROUPS, BOUND, seed=seed
            ) as producer,
        ):
            for step in range(NUM_STEPS):
                await cause(step)
                batch = await anext(producer)
                for request in (each for group in batch.groups for each in group.requests):
                    assert request.request_id not in seen, "each rollout comes once"
                    seen.add(request.request_id)
                    ages.update(kv_ages(request))
                rows = batch.rollouts
                lags.update(rows.policy_lag_BT[rows.mask_BT].tolist())
                rewards.append(float(rows.rewards_B.mean()))
                advantages_PG = group_advantages(rows.rewards_B.view(-1, GROUP_SIZE))
                loss, _ = policy_loss(
                    token_logprobs(policy(rows.tokens_BT).logits, rows.tokens_BT),
                    rows.behaviour_logprobs_BT,
                    advantages_PG.view(-1, 1),
                    rows.mask_BT,
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                await weight_sync.apush(policy)
            os.kill(fleet_pids()[0], signal.SIGKILL)  # the coordinator
            with pytest.raises(CoordinatorLostError):
                await llm.generate([1])
    first, last = fmean(rewards[:5]), fmean(rewards[-5:])
    assert len(seen) == NUM_STEPS * BATCH_GROUPS * GROUP_SIZE
    assert max(ages) <= BOUND, "the age of KV is bounded"
    assert max(lags) <= BOUND, "so is the age of a token's policy"
    assert last > first + 0.25
    return (
        f"reward {first:.2f} -> {last:.2f}, {len(seen)} rollouts, tokens by the age of their "
        f"oldest KV {dict(ages)}, by the age of their policy {dict(lags)}"
    )


def kv_ages(request: Any) -> list[int]:
    """Return how many versions the oldest KV under each token was behind."""
    pairs = zip(request.policy_versions, request.context_kv_version_min, strict=True)
    return [int(policy - oldest) for policy, oldest in pairs]


async def is_served_by(llm: AsyncLLM, count: int) -> bool:
    """Return whether `count` engines have the fleet's version of the weights."""
    ranks = (await llm.client.engine_stats()).by_rank
    return [stats.weights_version for stats in ranks.values()] == [llm.weights_version] * count


@asynccontextmanager
async def faults(llm: AsyncLLM, directory: Path) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Yield a function that causes the fault of a step."""
    _, first, second = fleet_pids()
    options = json.dumps(CONFIG["engine_options"])
    fields = CONFIG | {"engine_options": options}
    settings = [f"model={directory}", *(f"{name}={value}" for name, value in fields.items())]
    with ExitStack() as stack:

        async def cause(step: int) -> None:
            if step == KILL_AT:
                os.kill(first, signal.SIGKILL)
            if step == STOP_AT:
                os.kill(second, signal.SIGSTOP)
            if step == CONTINUE_AT:
                os.kill(second, signal.SIGCONT)
            if step == JOIN_AT:
                stack.enter_context(shell("engine", "--join", llm.address, *settings))
            if step == JOINED_AT:
                await until(partial(is_served_by, llm, 3), "all engines serve the newest weights")

        yield cause
