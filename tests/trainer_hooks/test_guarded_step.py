"""GuardedStep: a NaN or infinite gradient reaches neither the policy nor its optimizer."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rollout.errors import ConfigError
from tests.tiny_models import tiny_model
from tests.trainer_hooks.test_micro_batches import columns_of, random_batch
from trainer_hooks import (
    GuardedStep,
    NonFiniteGradientError,
    PolicyLossConfig,
    UpdateSettings,
    update_policy,
)
from trainer_hooks.doctor.command import load_rollouts
from trainer_hooks.weight_sync.trainer_ranks import TrainerRanks


class BadElsewhere(TrainerRanks):
    """Two ranks; the gradient of the other one is not finite."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1


def trained(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Return AdamW after one good step, so that it has a state, and a copy of what must not
    change.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with_gradients(model, 1.0)
    optimizer.step()
    return optimizer, snapshot(model, optimizer)


def with_gradients(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    next(model.parameters()).grad.view(-1)[0] = value  # type: ignore[union-attr]


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return all(same(first[name], second[name]) for name in first | second)
    return all(map(same, first, second)) if isinstance(first, (list, tuple)) else first == second


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_guarded_step_skips_logs_and_saves_a_step_without_a_finite_gradient(
    value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = nn.Linear(4, 4), random_batch()
    optimizer, before = trained(model)
    guard = GuardedStep(optimizer, 1.0, directory=tmp_path / "skipped")
    for number in (1, 2):
        with_gradients(model, value)
        _, is_done = guard.step([model], batch)
        assert not is_done
        assert same(snapshot(model, optimizer), before)
        saved = load_rollouts(tmp_path / "skipped" / f"skipped_{number}.pt")
        assert torch.equal(saved.batch.tokens_BT, batch.tokens_BT)
    assert guard.num_skipped == 2
    assert len([r for r in caplog.records if "skipped an optimizer step" in r.getMessage()]) == 2
    assert str(tmp_path / "skipped" / "skipped_2.pt") in caplog.text
    with_gradients(model, 1.0)
    assert guard.step([model]) == (pytest.approx(2.4, abs=0.2), True)
    assert not same(snapshot(model, optimizer), before)


def test_guarded_step_checks_all_models_and_overwrites_no_saved_batch(tmp_path: Path) -> None:
    policy, critic, batch = nn.Linear(2, 2), nn.Linear(2, 1), random_batch()
    optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=0.1)
    for _ in range(2):  # each run with a guard of its own
        with_gradients(policy, 1.0)
        with_gradients(critic, math.nan)
        assert not GuardedStep(optimizer, 1.0, directory=tmp_path).step([policy, critic], batch)[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["skipped_1.pt", "skipped_2.pt"]


def test_guarded_step_skips_on_all_ranks_if_one_gradient_is_not_finite(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer, before = trained(model)
    ranks = BadElsewhere(rank=1, size=2)
    guard = GuardedStep(optimizer, 1.0, ranks=ranks, directory=tmp_path / "skipped")
    with_gradients(model, 1.0)
    assert not guard.step([model], random_batch())[1]
    assert same(snapshot(model, optimizer), before)
    assert not (tmp_path / "skipped").exists()  # rank 0 has the batch, too


def test_guarded_step_raises_after_max_skipped_successive_steps() -> None:
    model = nn.Linear(4, 4)
    optimizer, _ = trained(model)
    guard = GuardedStep(optimizer, 1.0, max_skipped=3)
    for value in (math.nan, math.nan, 1.0, math.nan, math.nan):
        with_gradients(model, value)
        guard.step([model])
    before = snapshot(model, optimizer)
    with_gradients(model, math.inf)
    with pytest.raises(NonFiniteGradientError, match=r"3 optimizer steps in a row .*max_skipped"):
        guard.step([model])
    assert same(snapshot(model, optimizer), before)
    for max_skipped in (0, -1, math.nan):
        with pytest.raises(ConfigError, match="max_skipped_steps="):
            GuardedStep(optimizer, 1.0, max_skipped)  # type: ignore[arg-type]


def test_update_policy_skips_a_batch_whose_loss_is_nan() -> None:
    policy, batch = tiny_model("qwen3", std=0.05).train(), random_batch()
    optimizer, before = trained(policy)
    columns = columns_of(batch)
    spoilt = {**columns, "advantages_BT": columns["advantages_BT"] * math.nan}
    guard = GuardedStep(optimizer, 1.0, max_skipped=2)
    how = PolicyLossConfig(), UpdateSettings()
    rows = update_policy(policy, optimizer, batch, spoilt, *how, guard=guard)
    assert rows == [{"skipped_steps": 1.0}]
    assert same(snapshot(policy, optimizer), before)
    (row,) = update_policy(policy, optimizer, batch, columns, *how, guard=guard)
    assert row["skipped_steps"] == 0.0
    assert math.isfinite(row["grad_norm"])
    settings = UpdateSettings(num_iterations=3, max_skipped_steps=3)
    with pytest.raises(NonFiniteGradientError):
        update_policy(policy, optimizer, batch, spoilt, PolicyLossConfig(), settings)
