"""Properties of policy_loss that hold for every kind and every batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer_hooks.loss_batches import Batch, random_batch
from trainer_hooks import (
    OffPolicyCorrection,
    PolicyLossConfig,
    kl_estimate,
    policy_loss,
    token_entropies,
    token_logprobs,
    token_rewards,
)
from trainer_hooks.losses import POLICY_LOSS_KINDS

NAN = math.nan
CORRECTIONS = [
    OffPolicyCorrection(),
    OffPolicyCorrection(mode="truncate"),
    OffPolicyCorrection(mode="mask"),
    OffPolicyCorrection(mode="truncate", level="sequence"),
    OffPolicyCorrection(mode="mask", level="sequence"),
    OffPolicyCorrection(mode="truncate", level="geometric"),
    OffPolicyCorrection(mode="mask", level="geometric", low=0.9, high=1.2),
    OffPolicyCorrection(mode="truncate", lag_decay=0.5),
    OffPolicyCorrection(mode="mask", lag_decay=0.5, max_kv_lag=3.0),
]
configs = st.builds(
    PolicyLossConfig,
    kind=st.sampled_from(POLICY_LOSS_KINDS),
    correction=st.sampled_from(CORRECTIONS),
    kl_coefficient=st.sampled_from([0.0, 0.2]),
    kl_estimator=st.sampled_from(["k2", "k3"]),
    kl_importance_weighted=st.booleans(),
)
seeds = st.integers(0, 10_000)


def run(
    batch: Batch, config: PolicyLossConfig, proximal: bool = True, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    proximal = proximal or config.correction.needs_proximal
    loss, metrics = policy_loss(
        logprobs_BT,
        batch.behaviour_BT,
        batch.advantages_B1,
        batch.mask_BT,
        config,
        reference_logprobs_BT=batch.reference_BT,
        proximal_logprobs_BT=batch.proximal_BT if proximal else None,
        policy_lag_BT=batch.policy_lag_BT,
        kv_lag_BT=batch.kv_lag_BT,
        **options,
    )
    loss.backward()
    assert logprobs_BT.grad is not None
    return loss.detach(), logprobs_BT.grad, metrics


def changed(batch: Batch, change: Any) -> Batch:
    """Return the batch with `change(name, value)` applied to every tensor of [B, T]."""
    values = dict(vars(batch).items())
    wide = {name: change(name, value) for name, value in values.items() if value.shape[1] > 1}
    return Batch(**{**values, **wide})


@given(seed=seeds, config=configs, proximal=st.booleans())
def test_policy_loss_does_not_depend_on_values_outside_the_mask(
    seed: int, config: PolicyLossConfig, proximal: bool
) -> None:
    batch = random_batch(seed)

    def spoil(name: str, value: torch.Tensor) -> torch.Tensor:
        if name == "mask_BT":
            return value
        return value.float().masked_fill(~batch.mask_BT, math.nan)

    loss, gradient_BT, metrics = run(batch, config, proximal)
    other_loss, other_gradient_BT, other_metrics = run(changed(batch, spoil), config, proximal)
    assert torch.equal(loss, other_loss)
    assert torch.equal(gradient_BT, other_gradient_BT)
    assert metrics == other_metrics
    assert (gradient_BT[~batch.mask_BT] == 0).all()


@given(seed=seeds, config=configs, proximal=st.booleans(), width=st.integers(1, 7))
def test_policy_loss_does_not_depend_on_padding(
    seed: int, config: PolicyLossConfig, proximal: bool, width: int
) -> None:
    batch = random_batch(seed)
    padded = changed(batch, lambda _, value: pad(value, (0, width)))
    loss, gradient_BT, _ = run(batch, config, proximal)
    padded_loss, padded_gradient_BT, _ = run(padded, config, proximal)
    assert_close(loss, padded_loss)
    assert_close(pad(gradient_BT, (0, width)), padded_gradient_BT)


@given(seed=seeds, config=configs, proximal=st.booleans())
def test_policy_loss_does_not_depend_on_the_order_of_rollouts(
    seed: int, config: PolicyLossConfig, proximal: bool
) -> None:
    batch = random_batch(seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    loss, gradient_BT, metrics = run(batch, config, proximal)
    other_loss, other_gradient_BT, other_metrics = run(batch.select(order), config, proximal)
    assert_close(loss, other_loss, rtol=1e-5, atol=1e-6)
    assert_close(gradient_BT[order], other_gradient_BT)
    assert metrics == pytest.approx(other_metrics, rel=1e-4, abs=1e-5)


@given(seed=seeds, config=configs, proximal=st.booleans(), cut=st.integers(1, 5))
def test_policy_losses_of_parts_with_the_denominator_of_the_batch_add_up(
    seed: int, config: PolicyLossConfig, proximal: bool, cut: int
) -> None:
    batch = random_batch(seed)
    by_token = config.resolved_aggregation == "token-mean"
    denominator = int(batch.mask_BT.sum()) if by_token else 6
    loss, gradient_BT, _ = run(batch, config, proximal)
    parts = [
        run(batch.select(rows), config, proximal, aggregation_denominator=denominator)
        for rows in (slice(0, cut), slice(cut, 6))
    ]
    assert_close(parts[0][0] + parts[1][0], loss, rtol=1e-5, atol=1e-6)
    assert_close(torch.cat([parts[0][1], parts[1][1]]), gradient_BT)


@given(
    seed=seeds,
    kind=st.sampled_from(POLICY_LOSS_KINDS),
    correction=st.sampled_from(CORRECTIONS),
    proximal=st.booleans(),
)
def test_corrections_have_no_effect_on_policy(
    seed: int, kind: str, correction: OffPolicyCorrection, proximal: bool
) -> None:
    batch = random_batch(seed)
    values = {**vars(batch), "behaviour_BT": batch.logprobs_BT, "proximal_BT": batch.logprobs_BT}
    # Where nothing is old, no token's KV is too old either.
    batch = Batch(**{**values, "kv_lag_BT": torch.zeros_like(batch.kv_lag_BT)})
    loss, gradient_BT, metrics = run(batch, PolicyLossConfig(kind=kind), proximal=False)
    config = PolicyLossConfig(kind=kind, correction=correction)
    corrected_loss, corrected_gradient_BT, corrected_metrics = run(batch, config, proximal)
    assert_close(corrected_loss, loss)
    assert_close(corrected_gradient_BT, gradient_BT)
    assert metrics["eff_sample_size"] == pytest.approx(1.0)
    assert metrics["clip_ratio/region_mean"] == metrics["approx_kl"] == 0.0
    assert corrected_metrics.get("sampling/importance_sampling_ratio/mean", 1.0) == pytest.approx(
        1.0
    )


@given(seed=seeds, kind=st.sampled_from(["grpo", "ppo", "dapo", "dr_grpo"]))
def test_gradient_is_that_worked_out_by_hand(seed: int, kind: str) -> None:
    # d/d log pi of -min(r A, clip(r) A): -r A, and 0 where the clip is the smaller
    batch, config = random_batch(seed), PolicyLossConfig(kind=kind)
    _, gradient_BT, _ = run(batch, config, proximal=False)
    ratio_BT = (batch.logprobs_BT - batch.behaviour_BT).exp()
    low, high = config.clip_range
    up, down = batch.advantages_B1 > 0, batch.advantages_B1 < 0
    free_BT = ~((ratio_BT > 1 + high) & up | (ratio_BT < 1 - low) & down) & batch.mask_BT
    lengths_B1 = batch.mask_BT.sum(dim=1, keepdim=True)
    scale = {
        "token-mean": lengths_B1.sum(),
        "seq-mean-token-sum": 6,
        "seq-mean-token-mean": 6 * lengths_B1,
    }[config.resolved_aggregation]
    assert_close(gradient_BT, -ratio_BT * batch.advantages_B1 * free_BT / scale)


class SyncingCalls(TorchDispatchMode):
    """Collects the operations that make a device wait for the host, or the host for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        name = func.__name__.partition(".")[0]
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "index", "unique"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@given(config=configs, proximal=st.booleans())
def test_policy_loss_calls_nothing_that_synchronizes_with_the_device(
    config: PolicyLossConfig, proximal: bool
) -> None:
    batch = random_batch(0)
    with SyncingCalls() as calls:
        run(batch, config, proximal)
    assert calls.names == []


@given(seed=seeds, high=st.floats(1.0, 5.0), lag=st.integers(0, 8))
def test_correction_weight_never_grows_with_the_lag(seed: int, high: float, lag: int) -> None:
    batch = random_batch(seed)
    weights = []
    for policy_lag in (lag, lag + 1):
        older = Batch(**{**vars(batch), "policy_lag_BT": torch.full((6, 9), policy_lag)})
        correction = OffPolicyCorrection(mode="truncate", high=high, lag_decay=0.3)
        _, _, metrics = run(older, PolicyLossConfig(correction=correction))
        weights.append(metrics["sampling/importance_sampling_ratio/mean"])
    assert weights[1] <= weights[0] + 1e-6


# Log-probs as trainers and references have them when something is off: a token that the model
# excludes, one that is all but certain, masks of the lowest float32, log-probs above 0.
EXTREMES = (-math.inf, -3.4e38, -1e30, -1e4, -88.0, 0.0, 50.0, 1e4)


@given(
    seed=seeds,
    config=configs,
    proximal=st.booleans(),
    level=st.sampled_from(["logprobs_BT", "behaviour_BT", "proximal_BT", "reference_BT", "all"]),
    value=st.sampled_from(EXTREMES),
    entropy_coefficient=st.sampled_from([0.0, 0.1]),
    max_sequence_kl=st.sampled_from([None, 0.1]),
    advantages=st.sampled_from(["random", "zero"]),
)
def test_extreme_log_probs_have_a_finite_loss_and_gradient(
    seed: int, config: PolicyLossConfig, proximal: bool, level: str, value: float,
    entropy_coefficient: float, max_sequence_kl: float | None, advantages: str,
) -> None:  # fmt: skip
    batch = random_batch(seed)
    chosen_BT = torch.rand(batch.mask_BT.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    names = ["logprobs_BT", "behaviour_BT", "proximal_BT", "reference_BT"]
    values = dict(vars(batch))
    for name in names if level == "all" else [level]:
        values[name] = values[name].masked_fill(chosen_BT, value)
    if advantages == "zero":
        values["advantages_B1"] = torch.zeros_like(values["advantages_B1"])
    config = replace(
        config, entropy_coefficient=entropy_coefficient, max_sequence_kl=max_sequence_kl
    )
    entropies_BT = torch.ones(batch.mask_BT.shape)
    loss, gradient_BT, metrics = run(Batch(**values), config, proximal, entropies_BT=entropies_BT)
    assert loss.isfinite()
    assert gradient_BT.isfinite().all()
    assert all(map(math.isfinite, metrics.values())), metrics


@given(seed=seeds, config=configs, proximal=st.booleans())
def test_a_batch_without_a_trained_token_has_no_loss_and_no_gradient(
    seed: int, config: PolicyLossConfig, proximal: bool
) -> None:
    batch = random_batch(seed)
    nothing = changed(batch, lambda name, v: torch.zeros_like(v) if name == "mask_BT" else v * NAN)
    loss, gradient_BT, metrics = run(nothing, config, proximal)
    assert loss == 0.0
    assert (gradient_BT == 0.0).all()
    assert all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("reference", EXTREMES)
def test_token_rewards_are_finite(estimator: Any, value: float, reference: float) -> None:
    mask_BT = torch.ones(1, 2, dtype=torch.bool)
    rewards_BT = token_rewards(
        torch.ones(1), torch.full((1, 2), value), torch.full((1, 2), reference), mask_BT, 0.1,
        estimator,
    )  # fmt: skip
    assert rewards_BT.isfinite().all()
    assert kl_estimate(torch.tensor(value), torch.tensor(reference), estimator).isfinite()


def test_entropy_of_logits_that_exclude_tokens_is_finite_with_its_gradient() -> None:
    logits_BTV = torch.tensor([[[0.0, -math.inf, 1.0], [0.0, 0.0, -math.inf]]], requires_grad=True)
    tokens_BT = torch.tensor([[0, 2]])
    logprobs_BT, entropies_BT = token_logprobs(logits_BTV, tokens_BT, return_entropy=True)
    assert entropies_BT[0, 1].item() == pytest.approx(0.5822, abs=1e-4)
    assert_close(entropies_BT.detach(), token_entropies(logits_BTV.detach()))
    (logprobs_BT + entropies_BT).sum().backward()
    assert logits_BTV.grad is not None
    assert logits_BTV.grad.isfinite().all()
