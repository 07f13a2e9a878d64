"""BFloat16AdamW: steps near the steps of AdamW, with half the state, and repeated by a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.errors import ConfigError
from tests.trainer_hooks.train.grpo_settings import tiny_settings
from trainer_hooks import TrainerState, load_checkpoint, save_checkpoint
from trainer_hooks.train.learner import optimizer_of
from trainer_hooks.update import bfloat16_adamw as module
from trainer_hooks.update.bfloat16_adamw import BFloat16AdamW

RATE, BETAS = 0.01, (0.9, 0.999)


class Saved(torch.nn.Module):
    """A module with a contiguous weight, another one, and `save_pretrained`."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.zeros(60, 50))
        self.turned = torch.nn.Parameter(torch.zeros(7, 9).t())

    def save_pretrained(self, save_directory: str) -> None:
        torch.save(self.state_dict(), Path(save_directory) / "model.pt")


def train(policy: Saved, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Make steps with noisy gradients of sizes from 1e-6 to 1, the same in each call."""
    for step in steps:
        draws = torch.Generator().manual_seed(step)
        for weight in policy.parameters():
            sizes = torch.logspace(-6, 0, weight.numel()).view(weight.shape)
            noise = torch.randn(weight.shape, generator=draws)
            weight.grad = sizes * (0.3 + noise)
        optimizer.step()


def values_of(policy: Saved) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in policy.parameters()])


@pytest.mark.parametrize("chunk", [64, 1 << 17])
def test_bfloat16_adamw_stays_within_two_percent_of_adamw_over_100_steps(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CPU_CHUNK", chunk)
    ours, theirs = Saved(), Saved()
    train(ours, BFloat16AdamW(ours.parameters(), lr=RATE, betas=BETAS), range(100))
    exact = torch.optim.AdamW(theirs.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0)
    train(theirs, exact, range(100))
    errors, moved = values_of(ours) - values_of(theirs), values_of(theirs)
    assert errors.norm() < 0.02 * moved.norm()
    assert abs(errors.mean()) < 0.002 * moved.abs().mean()  # no bias, as rounding down would have


def test_bfloat16_adamw_second_moment_follows_changes_below_half_a_bit() -> None:
    """With beta2=0.999 a step changes the moment by 0.1%, and the last bit is 0.4% to 0.8%."""
    weight = torch.nn.Parameter(torch.zeros(10_000))
    optimizer = BFloat16AdamW([weight], betas=BETAS)
    for gradient in [1.0] + [0.0] * 700:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    mean = optimizer.state[weight]["exp_avg_sq"].float().mean()
    assert float(mean) == pytest.approx(0.001 * 0.999**700, rel=0.01)


def test_bfloat16_adamw_state_has_half_the_bytes() -> None:
    policy = Saved()
    optimizer = BFloat16AdamW(policy.parameters())
    train(policy, optimizer, range(1))
    for weight, state in optimizer.state.items():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
        assert state["exp_avg"].nbytes == weight.nbytes // 2


def test_bfloat16_adamw_continues_bit_for_bit_from_a_checkpoint(tmp_path: Path) -> None:
    whole, cut = Saved(), Saved()
    train(whole, BFloat16AdamW(whole.parameters()), range(8))
    optimizer = BFloat16AdamW(cut.parameters())
    train(cut, optimizer, range(5))
    saved = save_checkpoint(tmp_path, TrainerState(step=5, weights_version=1), cut, optimizer)
    resumed = Saved()
    resumed.load_state_dict(torch.load(saved / "model.pt"))
    torch.manual_seed(77)  # another state of the global generator than in the run
    again = BFloat16AdamW(resumed.parameters())
    load_checkpoint(saved, again)
    train(resumed, again, range(5, 8))
    assert torch.equal(values_of(resumed), values_of(whole))
    with pytest.raises(ConfigError, match="optimizer BFloat16AdamW, this run AdamW"):
        load_checkpoint(saved, torch.optim.AdamW(resumed.parameters()))


def test_bfloat16_adamw_refuses_weights_in_another_dtype() -> None:
    with pytest.raises(ConfigError, match=r"torch\.float32"):
        BFloat16AdamW([torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))])


@pytest.mark.parametrize(("dtype", "kind"), [("float32", torch.optim.AdamW), ("bfloat16", None)])
def test_optimizer_state_dtype_chooses_the_optimizer(dtype: str, kind: Any) -> None:
    settings = tiny_settings(trainer__optimizer_state_dtype=dtype).trainer
    groups = [{"params": list(Saved().parameters()), "lr": 0.5}]
    optimizer = optimizer_of(groups, settings)
    assert type(optimizer) is (kind or BFloat16AdamW)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["betas"] == settings.betas


def test_bfloat16_adamw_takes_an_expanded_gradient() -> None:
    weight = torch.nn.Parameter(torch.zeros(12, 10))
    weight.grad = torch.ones(()).expand(12, 10)
    BFloat16AdamW([weight], lr=RATE).step()
    torch.testing.assert_close(weight.detach(), torch.full((12, 10), -RATE))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bfloat16_adamw_on_a_gpu_steps_as_on_a_cpu() -> None:
    ours, theirs = Saved(), Saved().cuda()
    for policy in (ours, theirs):
        optimizer = BFloat16AdamW(policy.parameters(), lr=RATE, betas=BETAS)
        for step in range(20):
            for weight in policy.parameters():
                weight.grad = torch.full_like(weight, 0.5 + step % 3)
            optimizer.step()
    errors = values_of(ours) - values_of(theirs).cpu()
    assert errors.norm() < 0.02 * values_of(ours).norm()  # other random bits, hence near
