"""VerifiersV1Environment: unmodified environments of verifiers.v1, through a producer over a real
engine.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout import LLM, SamplingParams
from rollout.errors import ConfigError
from tests.serve import chat_model
from trainer_hooks import AsyncRolloutProducer, ThreadedLLM, token_logprobs
from trainer_hooks.environments.verifiers_v1 import VerifiersV1Environment

GROUP_SIZE = 4
PARAMS = SamplingParams(
    num_tokens_to_generate=10, return_log_probs=True, logprobs_mode="temperature"
)


def test_missing_optional_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"pip install 'verifiers>=0.4'"):
        VerifiersV1Environment.load("gsm8k", None)


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny model's tokenizer. The plug-ins of this directory and of tests/doors can be
    loaded.
    """
    pytest.importorskip("verifiers.v1")
    here = Path(__file__).parent
    for directory in (here.parents[1] / "doors", here):
        monkeypatch.syspath_prepend(directory)
    return AutoTokenizer.from_pretrained(chat_model.directory())


def batch_of(tokenizer: Any) -> Any:
    """Return a batch with each of the environment's tasks."""

    async def produce() -> Any:
        async with (
            VerifiersV1Environment.load("verifiers_v1_plugin", tokenizer) as environment,
            AsyncRolloutProducer(
                ThreadedLLM(direct),
                environment.prompts(),
                None,
                GROUP_SIZE,
                4,
                max_staleness_versions=0,
                rollout_fn=environment,
                sampling_params=PARAMS,
                min_valid_samples=0,
            ) as producer,
        ):
            return await anext(producer)

    with LLM(chat_model.directory(), max_sequence_length=512, buffer_size_gb=0.05) as direct:
        return asyncio.run(produce())


def test_verifiers_v1_environment_runs_unmodified_and_faults_fail_one_rollout(
    tokenizer: Any,
) -> None:
    batch = batch_of(tokenizer)
    names = ["red", "blue", "broken", "green"]
    for group in batch.groups:
        name = names[group.item.columns["task_index"]]
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
            if name == "broken":
                assert rollout.failure == "HarnessError"
                assert "no database" in rollout.state["error"], rollout.state
                continue
            assert rollout.failure is None
            assert len(rollout.requests) == reward.terms["turns"] == 2
            assert list(rollout.sequence_starts) == [0]
            assert float(reward) == pytest.approx(reward.terms["vowels"] + 1.0)
            assert rollout.state["environment"] == {"asked": name}
            text = "".join(
                tokenizer.decode(turn.generated_tokens, skip_special_tokens=True)
                for turn in rollout.requests
            )
            assert reward.terms["length"] == len(text)


def test_verifiers_v1_mask_covers_sampled_tokens_with_the_trainers_log_probs(
    tokenizer: Any,
) -> None:
    batch = batch_of(tokenizer)
    rows = batch.rollouts
    policy = AutoModelForCausalLM.from_pretrained(chat_model.directory(), dtype=torch.float32)
    with torch.no_grad():
        logprobs_BT = token_logprobs(policy(rows.tokens_BT).logits, rows.tokens_BT)
    assert bool(rows.mask_BT.any())
    gaps = (logprobs_BT - rows.behaviour_logprobs_BT)[rows.mask_BT].abs()
    assert bool((gaps < 1e-3).all()), gaps.max()
    sampled = [
        [] if rollout.failure else rollout.generated_ids
        for group in batch.groups
        for rollout in group.rollouts
    ]
    masked = [rows.tokens_BT[i][rows.mask_BT[i]].tolist() for i in range(len(rows.tokens_BT))]
    assert masked == sampled


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [("no_such_taskset", {}, "not found"), ("verifiers_v1_plugin", {"x": 1}, "x")],
)
def test_verifiers_load_names_what_cannot_be_loaded(
    name: str, args: dict[str, Any], reason: str, tokenizer: Any
) -> None:
    with pytest.raises(
        ConfigError, match=f"(?s)the environment '{name}' cannot be loaded: .*{reason}"
    ):
        VerifiersV1Environment.load(name, tokenizer, args)
