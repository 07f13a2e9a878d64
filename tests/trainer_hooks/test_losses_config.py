"""Settings of losses that cannot work, refused with the value and a remedy."""

from typing import Any

import pytest
import torch

from rollout.errors import ConfigError
from trainer_hooks import OffPolicyCorrection, PolicyLossConfig, policy_loss
from trainer_hooks.losses import POLICY_LOSS_KINDS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "grop"}, "kind='grop' must be one of .*'grpo', 'ppo'"),
        ({"epsilon_low": 1.5}, "epsilon_low=1.5"),
        ({"epsilon_high": -0.1}, "epsilon_high=-0.1"),
        ({"aggregation": "mean"}, "aggregation='mean'.*'token-mean'"),
        ({"kl_estimator": "k4"}, "kl_estimator='k4'.*'k1', 'k2', 'k3'"),
        ({"kl_coefficient": -1.0}, "kl_coefficient=-1.0"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "'k1' as a loss.*token_rewards"),
        ({"kind": "gspo", "dual_clip": 3.0}, "dual_clip=3.0 with kind='gspo'.*choose.*ppo"),
        ({"kind": "cispo", "dual_clip": 9.0}, "dual_clip=9.0 with kind='cispo'"),
        ({"kind": "ppo", "dual_clip": 1.1}, "dual_clip=1.1 must be above .*1.2; 3"),
        ({"kind": "gspo", "aggregation": "token-mean"}, "kind='gspo'.*leave it out"),
        ({"kind": "rloo", "aggregation": "seq-mean-token-sum"}, "kind='rloo'.*leave it out"),
        ({"max_completion_length": 8}, "max_completion_length=8.*'token-mean'.*dr_grpo"),
        ({"kind": "dr_grpo", "max_completion_length": 0}, "max_completion_length=0"),
    ],
)
def test_policy_loss_config_refuses_settings_that_cannot_work(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyLossConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "clip"}, "mode='clip'.*'truncate'"),
        ({"mode": "mask", "level": "row"}, "level='row'.*'geometric'"),
        ({"mode": "mask", "low": 1.5}, r"low=1.5 must be .*in \[0, 1\]"),
        ({"mode": "truncate", "high": 0.5}, "high=0.5 must be .*at least 1"),
        ({"mode": "truncate", "lag_decay": -1.0}, "lag_decay=-1.0"),
        ({"mode": "truncate", "max_kv_lag": -1.0}, "max_kv_lag=-1.0"),
        ({"mode": "none", "high": 2.0}, "mode='none' takes no other.*mode='truncate'"),
        ({"max_kv_lag": 1.0}, "mode='auto' takes no other"),
        (
            {"mode": "mask", "level": "sequence", "lag_decay": 0.5},
            "lag_decay=0.5.*level='sequence'.*level='token'",
        ),
    ],
)
def test_off_policy_correction_refuses_settings_that_cannot_work(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        OffPolicyCorrection(**fields)


@pytest.mark.parametrize("kind", POLICY_LOSS_KINDS)
def test_policy_loss_config_accepts_every_kind_with_its_own_constants(kind: str) -> None:
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    loss, _ = policy_loss(
        logprobs,
        logprobs.detach(),
        torch.tensor([[1.0], [-1.0]]),
        torch.ones(2, 3),
        PolicyLossConfig(kind=kind),
    )
    loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad[0] < 0).all()
    assert (logprobs.grad[1] > 0).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"lag_decay": 0.5}, "policy_lag_BT is missing"), ({"max_kv_lag": 1.0}, "needs kv_lag_BT")],
)
def test_lag_decay_and_max_kv_lag_need_the_lags(fields: dict[str, float], message: str) -> None:
    zeros, correction = torch.zeros(1, 2), OffPolicyCorrection(mode="truncate", **fields)
    with pytest.raises(ConfigError, match=message):
        policy_loss(
            *(zeros,) * 4, PolicyLossConfig(correction=correction), proximal_logprobs_BT=zeros
        )


def test_aggregation_denominator_of_zero_is_refused() -> None:
    zeros = torch.zeros(1, 2)
    with pytest.raises(ConfigError, match=r"aggregation_denominator=0\.0 must be above"):
        policy_loss(zeros, zeros, zeros, zeros, aggregation_denominator=0.0)
