"""Trains a policy on two ranks, or in one process, for test_sharded_learner to compare."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.trainer_hooks.fakes import finished_request
from tests.trainer_hooks.train.grpo_settings import tiny_settings
from trainer_hooks import (
    RolloutBatch,
    TrainerState,
    collate_rollouts,
    find_checkpoint,
    read_trainer_state,
)
from trainer_hooks.train.job import JobSettings
from trainer_hooks.train.learner import Learner, follow
from trainer_hooks.weight_sync.trainer_ranks import ALONE, TrainerRanks, torchrun_ranks

VOCABULARY = 32


def place_of(rank: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set for this rank of two."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in place.items()}


def train_all(jobs: Any) -> list[Any]:
    """Train each of `jobs`, (directory, changes, last step), as the rank that the environment
    names.

    Rank 0 returns each job's metrics.
    """
    reports = []
    with torchrun_ranks() as ranks:
        for folder, changes, last_step in jobs:
            settings = tiny_settings(trainer="fsdp2", **changes)
            if ranks.rank:
                follow(ranks, settings)
            else:
                reports.append(train(folder, settings, last_step, ranks))
                ranks.broadcast(None)
    return reports


def train_as_rank(rank: int, port: int, pipe: Any, jobs: Any) -> None:
    """Train as one of two ranks. Sends (traceback or None, metrics of each job) through `pipe`."""
    os.environ |= place_of(rank, port)
    torch.set_num_threads(1)
    try:
        pipe.send((None, train_all(jobs)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))


def begin(folder: Path, settings: JobSettings) -> None:
    """Write the checkpoint of step 0 and a reference policy."""
    torch.manual_seed(0)
    config = Qwen3Config(**settings.model.shape, vocab_size=VOCABULARY, tie_word_embeddings=True)
    policy, reference = Qwen3ForCausalLM(config), Qwen3ForCausalLM(config)
    reference.save_pretrained(folder / "reference")
    learner = Learner(policy, settings.algorithm, settings.trainer)
    learner.save(folder / "checkpoints", TrainerState(step=0, weights_version=0), None)


def train(
    folder: Path, settings: JobSettings, last_step: int, ranks: TrainerRanks = ALONE
) -> list[Mapping[str, float]]:
    """Train from the newest checkpoint to a checkpoint of `last_step`. Returns the metrics of each
    step.
    """
    checkpoint = find_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    first = read_trainer_state(checkpoint).step + 1
    learner, _ = Learner.load(checkpoint, settings, ranks)
    metrics = [learner.update(batch_of(step), step) for step in range(first, last_step + 1)]
    learner.save(
        folder / "checkpoints", TrainerState(step=last_step, weights_version=last_step), None
    )
    return metrics


def batch_of(step: int) -> RolloutBatch:
    """Return four groups of three rollouts of 1 to 12 tokens; one rollout failed, some are
    stale.
    """
    draw = torch.Generator().manual_seed(step)
    requests = []
    for _ in range(12):
        length = int(torch.randint(1, 13, (1,), generator=draw))
        tokens = torch.randint(VOCABULARY, (length,), generator=draw).tolist()
        versions = [step - 1 - int(torch.randint(2, (1,), generator=draw))] * length
        logprobs = (-3.5 + torch.rand(length, generator=draw)).tolist()
        requests.append(finished_request([1, 2], tokens, versions=versions, logprobs=logprobs))
    rewards: list[float | None] = torch.rand(12, generator=draw).tolist()
    rewards[4] = None
    return collate_rollouts(requests, rewards, train_version=step)
