"""ReferencePolicy: one that does not move, and one that follows the policy as in TRL."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from rollout.errors import ConfigError
from tests.tiny_models import tiny_model
from tests.trainer_hooks.fakes import finished_request
from trainer_hooks import (
    ReferencePolicy,
    ReferenceSettings,
    UpdateSettings,
    collate_rollouts,
    compute_logprobs,
)


def weights(reference: ReferencePolicy) -> torch.Tensor:
    """Return the reference's weights [2, 2], read from its state."""
    return reference.state_dict()["weight"]


def changed(policy: nn.Linear) -> nn.Linear:
    with torch.no_grad():
        policy.weight.mul_(1.5).add_(0.25)
    return policy


def test_reference_policy_does_not_move_without_sync_interval() -> None:
    policy = nn.Linear(2, 2)
    reference = ReferencePolicy.copy_of(policy)
    assert not any(reference.follow(changed(policy), step) for step in range(1, 5))
    assert reference.state_dict() == {}


@pytest.mark.parametrize(("interval", "weight"), [(3, 0.6), (2, 1.0), (1, 0.05)])
def test_reference_policy_follows_as_in_trl(interval: int, weight: float) -> None:
    pytest.importorskip("trl")
    from trl.trainer.callbacks import SyncRefModelCallback

    policy = nn.Linear(2, 2)
    theirs = copy.deepcopy(policy)
    settings = ReferenceSettings(sync_interval=interval, sync_weight=weight)
    reference = ReferencePolicy.copy_of(policy, settings)
    for step in range(1, 8):
        changed(policy)
        if step % interval == 0:
            SyncRefModelCallback._sync_target_model(policy, theirs, weight)
        assert reference.follow(policy, step) == (step % interval == 0)
        assert_close(weights(reference), theirs.weight.detach(), rtol=1e-6, atol=1e-6)


def test_reference_policy_continues_from_a_checkpoint() -> None:
    policy, settings = nn.Linear(2, 2), ReferenceSettings(sync_interval=1, sync_weight=0.3)
    reference = ReferencePolicy.copy_of(policy, settings)
    reference.follow(changed(policy), 1)
    resumed = ReferencePolicy.copy_of(nn.Linear(2, 2), settings)
    resumed.load_state_dict({name: each.clone() for name, each in reference.state_dict().items()})
    for each in (reference, resumed):
        each.follow(changed(copy.deepcopy(policy)), 2)
    assert torch.equal(weights(reference), weights(resumed))
    with pytest.raises(ConfigError, match="sync_interval=1, but the reference of the run in"):
        resumed.load_state_dict({})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sync_interval": 0}, "sync_interval=0 must be .*at least 1"),
        ({"sync_interval": 1, "sync_weight": 0.0}, r"sync_weight=0.0 must be .*\(0, 1\]"),
        ({"sync_interval": 1, "sync_weight": 1.5}, r"sync_weight=1.5 must be .*\(0, 1\]"),
        ({"sync_weight": 0.5}, "sync_weight=0.5 without sync_interval"),
    ],
)
def test_reference_settings_that_cannot_work_are_refused(
    values: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ReferenceSettings(**values)  # type: ignore[arg-type]


def test_reference_policy_without_adapter_refuses_to_follow() -> None:
    policy = nn.Linear(2, 2)
    settings = ReferenceSettings(sync_interval=1)
    with pytest.raises(ConfigError, match=r"base model cannot follow the policy.*copy_of"):
        ReferencePolicy(policy, torch.no_grad, settings)


def test_reference_policy_of_a_peft_model_is_its_base() -> None:
    import peft

    base = tiny_model("qwen3", std=0.05)
    requests = [
        finished_request([1, 2, 3], list(range(4, 4 + length)), versions=[0] * length)
        for length in (2, 5, 9)
    ]
    batch = collate_rollouts(requests, [1.0, 0.0, 1.0], train_version=0)
    before_BT = compute_logprobs(base, batch, UpdateSettings())
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    reference = ReferencePolicy.without_adapter(adapted)
    for settings in (UpdateSettings(), UpdateSettings(max_tokens=13, is_packed=True)):
        values_BT = reference.logprobs(batch, settings)
        assert_close(values_BT[batch.mask_BT], before_BT[batch.mask_BT], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(compute_logprobs(adapted, batch, UpdateSettings()), before_BT)
