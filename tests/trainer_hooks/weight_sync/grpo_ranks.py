"""Two ranks of an FSDP2 trainer take GRPO steps on rollouts of the engines that they push to."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from rollout import SamplingParams
from tests.contracts.weight_fleet import TRANSPORTS, WeightFleet
from tests.runner.trainer_ranks import gloo_mesh
from tests.tiny_models import generate_all, prompt_of, tiny_engine, tiny_model
from tests.trainer_hooks.weight_sync.trainers import in_shards
from trainer_hooks import (
    PolicyLossConfig,
    collate_rollouts,
    group_advantages,
    policy_loss,
    take_part,
    token_logprobs,
)
from trainer_hooks.weight_sync import weights_of

PARAMS = [
    SamplingParams(
        num_tokens_to_generate=6, seed=seed, return_log_probs=True, logprobs_mode="temperature"
    )
    for seed in range(4)
]
NUM_STEPS = 2


def train(path: Path, rank: int, pipe: Any, kind: str) -> None:
    """Send, after each step, (checksums that are served, checksum of the full state dict)."""
    try:
        mesh = gloo_mesh(dist.FileStore(str(path / "store"), 2), rank, num_ranks=2)
        policy = in_shards(tiny_model(seed=0), mesh)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
        fleet = WeightFleet(TRANSPORTS[kind](path)) if rank == 0 else None
        for _ in range(NUM_STEPS):
            _step(policy, optimizer, fleet)
            if fleet is None:
                take_part(policy)
            else:
                fleet.push(weights_of(policy))
            state = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True))
            if fleet is not None:
                whole = tiny_model(seed=0)
                whole.load_state_dict(state)
                pipe.send((list(fleet.checksums()), tiny_engine(whole).weights_checksum()))
        if fleet is not None:
            fleet.transport.close()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def _step(policy: Any, optimizer: Any, fleet: WeightFleet | None) -> None:
    """One GRPO step on a group that the first engine has generated."""
    given: list[Any] = [None]
    if fleet is not None:
        engine = fleet.members[0].engine
        requests = generate_all(engine, [(prompt_of(5), params) for params in PARAMS])
        rewards = torch.tensor([float(sum(r.generated_tokens) % 7) for r in requests])
        batch = collate_rollouts(requests, rewards, engine.weights_version)
        advantages = group_advantages(rewards.view(1, -1)).view(-1, 1)
        given = [(batch.tokens_BT, batch.behaviour_logprobs_BT, batch.mask_BT, advantages)]
    dist.broadcast_object_list(given, src=0)
    tokens_BT, behaviour_BT, mask_BT, advantages_B1 = given[0]
    logprobs_BT = token_logprobs(policy(tokens_BT).logits, tokens_BT)
    advantages_BT = advantages_B1.expand_as(logprobs_BT)
    loss, _ = policy_loss(
        logprobs_BT, behaviour_BT, advantages_BT, mask_BT, PolicyLossConfig(kind="grpo")
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
