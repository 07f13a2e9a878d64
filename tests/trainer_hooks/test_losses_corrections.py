"""correction_weights and the metrics by lag, against values worked out by hand."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from rollout.errors import ConfigError
from trainer_hooks import (
    OffPolicyCorrection,
    PolicyLossConfig,
    effective_sample_size,
    policy_loss,
)
from trainer_hooks.losses import correction_weights

LN2 = math.log(2.0)


def weights_of(ratios: list[list[float]], mask: Any = None, **fields: Any) -> torch.Tensor:
    log_ratio_BT = torch.tensor(ratios).log()
    mask_BT = torch.ones_like(log_ratio_BT).bool() if mask is None else torch.tensor(mask).bool()
    lags = {
        name: torch.tensor(fields.pop(name))
        for name in ("policy_lag_BT", "kv_lag_BT")
        if name in fields
    }
    log_ratio_BT = log_ratio_BT.masked_fill(~mask_BT, 0.0)
    return correction_weights(log_ratio_BT, mask_BT, OffPolicyCorrection(**fields), **lags)[0]


def test_truncate_caps_the_weight_of_each_token() -> None:
    assert_close(weights_of([[0.1, 1.0, 3.0]], mode="truncate"), torch.tensor([[0.1, 1.0, 2.0]]))
    raised = weights_of([[0.1, 1.0, 3.0]], mode="truncate", low=0.5, high=4.0)
    assert_close(raised, torch.tensor([[0.5, 1.0, 3.0]]))


def test_mask_drops_tokens_outside_the_band_and_keeps_other_weights() -> None:
    weights = weights_of([[0.4, 0.6, 4.0, 6.0]], mode="mask")
    assert_close(weights, torch.tensor([[0.0, 0.6, 4.0, 0.0]]))


def test_correction_level_weighs_by_the_product_or_the_geometric_mean_of_trained_tokens() -> None:
    ratios, mask = [[2.0, 2.0, 0.5], [4.0, 1.0, 9.0]], [[1, 1, 1], [1, 1, 0]]
    product = weights_of(ratios, mask, mode="truncate", level="sequence", high=3.0)
    assert_close(product[:, :2], torch.tensor([[2.0, 2.0], [3.0, 3.0]]))
    mean = weights_of(ratios, mask, mode="mask", level="geometric", high=1.9)
    assert_close(mean[:, :2], torch.tensor([[2.0 ** (1 / 3)] * 2, [0.0, 0.0]]))


def test_lag_decay_narrows_the_band_with_the_lag() -> None:
    # lag 3 + 1 = 4, d = 0.25: power 1 / 2, so the cap of 4 becomes 2 and the floor of 1/4 1/2
    options = {"policy_lag_BT": [[0, 3, 3]], "kv_lag_BT": [[0.0, 1.0, 1.0]]}
    band = {"low": 0.25, "high": 4.0, "lag_decay": 0.25}
    weights = weights_of([[3.0, 3.0, 0.3]], mode="truncate", **band, **options)
    assert_close(weights, torch.tensor([[3.0, 2.0, 0.5]]))
    weights = weights_of([[3.0, 3.0, 0.6]], mode="mask", **band, **options)
    assert_close(weights, torch.tensor([[3.0, 0.0, 0.6]]))


def test_max_kv_lag_drops_tokens_with_older_kv() -> None:
    weights = weights_of([[1.0, 3.0]], mode="truncate", max_kv_lag=1.0, kv_lag_BT=[[1.5, 1.0]])
    assert_close(weights, torch.tensor([[0.0, 2.0]]))


def gradient_of(ratio: float, mode: Any, proximal: float | None) -> float:
    """Return the gradient of one token with A = 1, `ratio` times as likely as when it was
    sampled.
    """
    logprobs = torch.tensor([[ratio]]).log().requires_grad_()
    loss, _ = policy_loss(
        logprobs,
        torch.zeros(1, 1),
        torch.ones(1, 1),
        torch.ones(1, 1),
        PolicyLossConfig(kind="grpo", correction=OffPolicyCorrection(mode=mode)),
        proximal_logprobs_BT=None if proximal is None else torch.tensor([[proximal]]).log(),
    )
    loss.backward()
    assert logprobs.grad is not None
    return float(logprobs.grad)


@pytest.mark.parametrize(
    ("mode", "proximal"), [("auto", None), ("none", None), ("truncate", 1.0), ("mask", 1.0)]
)
def test_a_token_that_has_moved_beyond_the_clip_has_no_gradient(
    mode: str, proximal: float | None
) -> None:
    assert gradient_of(3.0, mode, proximal) == 0.0


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_correction_without_proximal_logprobs_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match=f"mode='{mode}'.*needs proximal_logprobs_BT"):
        gradient_of(3.0, mode, None)


def test_token_older_than_the_proximal_policy_is_weighed_and_not_clipped() -> None:
    # All of the ratio of 3 is age: r = 1 and w = 3, truncated at 2.
    assert gradient_of(3.0, "truncate", 3.0) == pytest.approx(-2.0)
    assert gradient_of(3.0, "mask", 3.0) == pytest.approx(-3.0)


def test_correction_mode_none_ignores_the_age_of_rollouts() -> None:
    loss, metrics = policy_loss(
        torch.zeros(1, 1),
        torch.full((1, 1), -5.0),
        torch.ones(1, 1),
        torch.ones(1, 1),
        PolicyLossConfig(correction=OffPolicyCorrection(mode="none")),
        proximal_logprobs_BT=torch.zeros(1, 1),
    )
    assert float(loss) == -1.0
    assert metrics["rollout_corr/kl"] == -5.0


def test_effective_sample_size_of_equal_weights_is_one() -> None:
    mask = torch.tensor([[True, True, True, False]])
    assert float(effective_sample_size(torch.full((1, 4), 0.3), mask)) == pytest.approx(1.0)
    # (3 + 1 + 0)^2 / (3 * (9 + 1))
    weights = torch.tensor([[3.0, 1.0, 0.0, 7.0]])
    assert float(effective_sample_size(weights, mask)) == pytest.approx(16 / 30)
    assert float(effective_sample_size(torch.zeros(1, 4), mask)) == 0.0


def test_by_lag_metrics_come_by_cells_of_policy_lag_and_kv_lag() -> None:
    # A = 1, clipped above 1.28; cells (0, 0): ratios 1 and 2; (2-3, 1-up): ratio 1/2
    _, metrics = policy_loss(
        torch.tensor([[1.0, 2.0, 0.5, 9.0]]).log(),
        torch.zeros(1, 4),
        torch.ones(1, 1),
        torch.tensor([[1, 1, 1, 0]]),
        policy_lag_BT=torch.tensor([[0, 0, 3, 9]]),
        kv_lag_BT=torch.tensor([[0.0, 0.0, 1.5, 9.0]]),
    )
    cells = {name: value for name, value in metrics.items() if name.startswith("by_lag/")}
    fresh, old = "by_lag/policy_0_kv_0", "by_lag/policy_2-3_kv_1-up"
    assert cells == pytest.approx(
        {
            f"{fresh}/token_fraction": 2 / 3,
            f"{fresh}/ratio_mean": 1.5,
            f"{fresh}/weight_mean": 1.5,
            f"{fresh}/eff_sample_size": 9 / 10,
            f"{fresh}/approx_kl": (1.0 - LN2) / 2,
            f"{fresh}/clip_fraction": 0.5,
            f"{fresh}/masked_fraction": 0.0,
            f"{old}/token_fraction": 1 / 3,
            f"{old}/ratio_mean": 0.5,
            f"{old}/weight_mean": 0.5,
            f"{old}/eff_sample_size": 1.0,
            f"{old}/approx_kl": LN2 - 0.5,
            f"{old}/clip_fraction": 0.0,
            f"{old}/masked_fraction": 0.0,
        },
        rel=1e-5,
    )
    assert metrics["eff_sample_size"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert metrics["ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert (metrics["ratio_min"], metrics["ratio_max"]) == pytest.approx((0.5, 2.0))
