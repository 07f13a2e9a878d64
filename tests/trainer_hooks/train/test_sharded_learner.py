"""A policy divided by FSDP2 learns the same as the whole policy in one process."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from rollout.errors import ConfigError, WeightUpdateError
from tests.processes import PROCESSES
from tests.trainer_hooks.fakes import FakeLLM
from tests.trainer_hooks.train.grpo_settings import tiny_settings
from tests.trainer_hooks.train.sharded_ranks import begin, train, train_as_rank
from trainer_hooks import WeightSync
from trainer_hooks.train.job import JobSettings
from trainer_hooks.train.learner import Learner
from trainer_hooks.weight_sync.trainer_ranks import TrainerRanks

pytestmark = pytest.mark.distributed

# What a step divides by, passes that are uneven over the ranks, a norm that is clipped to, and
# log-probs that are computed beforehand: each has another way through a step.
CASES: Mapping[str, Mapping[str, Any]] = {
    "token-mean": {},
    "passes by tokens, clipped": {
        "algorithm__max_tokens_per_forward": 28,
        "trainer__max_grad_norm": 0.01,
        "algorithm__loss__kl_coefficient": 0.04,
    },
    "rollout-mean, packed, decoupled": {
        "algorithm": "grpo",
        "algorithm__groups_per_step": 4,
        "algorithm__group_size": 3,
        "algorithm__is_packed": True,
        "algorithm__decoupled": True,
        "algorithm__num_iterations": 2,
    },
    "checkpointed layers, moments in bfloat16": {
        "trainer__gradient_checkpointing": True,
        "trainer__optimizer_state_dtype": "bfloat16",
    },
}
# Largest difference of an optimizer's state, relative to its largest number: a part of a moment in
# bfloat16 is rounded by other random bits than the whole.
ROUNDING = {"checkpointed layers, moments in bfloat16": 0.05}


def test_fsdp2_steps_and_checkpoints_equal_those_of_one_process(tmp_path: Path) -> None:
    """Both train steps 1 and 2; then each trains step 3 from the other's checkpoint."""
    alone, sharded, swapped = {}, [], []
    for name, changes in CASES.items():
        folders = {kind: tmp_path / name / kind for kind in ("alone", "ranks")}
        settings = tiny_settings(**changes)
        begin(folders["alone"], settings)
        shutil.copytree(folders["alone"], folders["ranks"])
        sharded.append((folders["ranks"], changes, 2))
        alone[name] = train(folders["alone"], settings, 2)
        shutil.copytree(folders["alone"], tmp_path / name / "to ranks")
        swapped.append((tmp_path / name / "to ranks", changes, 3))
    reports = reports_of_ranks([*sharded, *swapped])
    for number, (name, changes) in enumerate(CASES.items()):
        for ours, theirs in zip(alone[name], reports[number], strict=True):
            assert theirs == pytest.approx(ours, rel=2e-4, abs=2e-5), name
        rounding = ROUNDING.get(name, 0.0)
        assert_same_checkpoint(tmp_path / name, "alone", "ranks", 2, rounding)
        train(tmp_path / name / "ranks", tiny_settings(**changes), 3)
        assert_same_checkpoint(tmp_path / name, "to ranks", "ranks", 3, rounding)


def reports_of_ranks(jobs: Any) -> list[Any]:
    """Return the metrics of each job from rank 0. An error of one rank ends the other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes, pipes = [], []
    for rank in range(2):
        mine, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=train_as_rank, args=(rank, port, theirs, jobs))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    try:
        reports = {}
        while len(reports) < len(pipes):
            for pipe in wait([pipe for pipe in pipes if pipe not in reports]):
                error, reports[pipe] = pipe.recv()
                assert error is None, error
        return reports[pipes[0]]
    finally:
        for process in processes:
            process.kill()
            process.join()


def assert_same_checkpoint(folder: Path, one: str, other: str, step: int, rounding: float) -> None:
    """Assert that two checkpoints have the same weights and optimizer state."""
    paths = [folder / kind / "checkpoints" / f"step_{step:06d}" for kind in (one, other)]
    models = [AutoModelForCausalLM.from_pretrained(path).state_dict() for path in paths]
    states = [torch.load(path / "optimizer.pt", weights_only=True) for path in paths]
    torch.testing.assert_close(*models, rtol=1e-3, atol=2e-5)
    for ours, theirs in zip(*(state["state"].values() for state in states), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            atol = max(1e-6, rounding * float(value.abs().max()))
            torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=atol)
    assert states[0]["param_groups"] == states[1]["param_groups"]


@pytest.mark.parametrize(("is_transient", "num_pushes"), [(True, 3), (False, 1)])
def test_learner_push_gathers_on_all_ranks_again_after_a_failed_engine(
    is_transient: bool, num_pushes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightSync, "retry_pauses_s", (0.0, 0.01))
    sent: list[Any] = []

    class Ranks(TrainerRanks):
        def broadcast(self, word: Any) -> None:
            sent.append(word)

    class LosesAnEngine(WeightSync):
        async def apush(self, *arguments: Any) -> Any:
            error = WeightUpdateError("rank 1 was lost before its vote")
            error.is_transient = is_transient
            raise error

    settings = tiny_settings()
    policy = torch.nn.Linear(2, 2)
    learner = Learner(policy, settings.algorithm, settings.trainer, None, Ranks(size=2))
    with pytest.raises(WeightUpdateError, match="rank 1 was lost"):
        asyncio.run(learner.push(LosesAnEngine(FakeLLM()), 1))
    assert sent == [("push",)] * num_pushes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "ppo", "algorithm__group_size": 1}, "critic is not supported with"),
        ({"model__lora__rank": 2, "model__lora__alpha": 4}, "lora is not supported with"),
        ({"launcher": "torchrun", "num_engines": 1}, "launcher=torchrun with trainer.strategy"),
    ],
)
def test_settings_that_fsdp2_does_not_support_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_settings(trainer="fsdp2", **changes)


def test_weight_transport_without_engine_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight_transport=collective with num_engines=0"):
        tiny_settings(weight_transport="collective")
    assert isinstance(tiny_settings(weight_transport="collective", num_engines=1), JobSettings)
