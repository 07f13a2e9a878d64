"""Logits keep the float32 sums of their product, for the engine and for a trainer's own pass.

On a device: half-precision products and norms against float64 at stated bounds; attention and
sampling have theirs in tests/contracts. Without one a stand-in for torch's product of that kind
shows that it is used, and what the gradient is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.backends.ops import float32_product as products
from rollout.backends.ops.float32_product import float32_product
from tests.contracts.on_device import device_ops
from trainer_hooks.losses.logprobs import head_logits, token_logprobs

HALVES = [torch.bfloat16, torch.float16]
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit in the last place
# Of float32 sums over 1024 terms: 1024 * 2^-24 of the sum of magnitudes, at worst.
SUM_BOUND = 2.0**-14


def factors(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 1024, generator=generator) for n in (9, 333))
    bias = torch.randn(333, generator=generator)
    return x.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


@pytest.fixture
def device_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's product with float32 sums, which only CUDA has, by one on the CPU."""
    plain = torch.mm

    def mm(x: Tensor, y: Tensor, *, out_dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
        if out_dtype is None:
            return plain(x, y, **rest)
        return plain(x.double(), y.double()).to(out_dtype)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(products, "can_keep_sums", lambda x: x.dtype in HALVES)


@pytest.mark.usefixtures("device_product")
@pytest.mark.parametrize("dtype", HALVES)
def test_logits_are_not_rounded_to_the_models_dtype(dtype: torch.dtype) -> None:
    x, weight, bias = factors(dtype)
    logits = float32_product(x, weight, bias)
    exact = x.double() @ weight.double().t() + bias.double()
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-4
    rounded = torch.nn.functional.linear(x, weight, bias)
    assert (rounded - exact).abs().max() > EPSILON[dtype]


@pytest.mark.usefixtures("device_product")
@pytest.mark.parametrize("dtype", HALVES)
def test_a_trainers_pass_has_the_engines_logits_and_the_gradient_of_a_plain_head(
    dtype: torch.dtype,
) -> None:
    x, weight, bias = (factor.requires_grad_() for factor in factors(dtype))
    tokens = torch.arange(9)[None]
    logits = head_logits(x[None], weight, bias)
    assert torch.equal(logits[0], float32_product(x, weight, bias))
    token_logprobs(logits, tokens).sum().backward()
    found = [factor.grad for factor in (x, weight, bias)]
    copies = [factor.detach().double().requires_grad_() for factor in (x, weight, bias)]
    exact = torch.nn.functional.linear(copies[0][None], *copies[1:])
    token_logprobs(exact, tokens).sum().backward()
    for grad, copy in zip(found, copies, strict=True):
        assert grad is not None
        assert copy.grad is not None
        bound = 8 * EPSILON[dtype] * copy.grad.abs().max()
        assert (grad - copy.grad).abs().max() <= bound


def test_without_such_a_device_logits_are_the_heads_own_cast() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias = factors(dtype)
        expected = torch.nn.functional.linear(x, weight, bias).float()
        assert torch.equal(float32_product(x, weight, bias), expected)
        assert torch.equal(head_logits(x[None], weight, bias)[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_a_devices_logits_are_within_the_rounding_of_float32_sums(dtype: torch.dtype) -> None:
    x, weight, bias = factors(dtype, "cuda")
    exact = x.double() @ weight.double().t() + bias.double()
    magnitude = x.double().abs() @ weight.double().abs().t()
    error = (float32_product(x, weight, bias).double() - exact).abs()
    assert bool((error <= SUM_BOUND * magnitude).all())


@pytest.mark.device
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
def test_norms_are_rounded_once_after_float32(dtype: torch.dtype) -> None:
    """The bound is half a unit in the last place of the result, and of the sum before it."""
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(1)
    x, residual = ((torch.randn(5, 1000, generator=generator) * 3).to(dtype) for _ in range(2))
    weight = torch.randn(1000, generator=generator).to(dtype)
    normed, total = device_ops().add_rms_norm(x, residual, weight, 1e-6)
    exact = x.double() + residual.double()
    assert bool(((total.double() - exact).abs() <= EPSILON[dtype] * exact.abs()).all())
    scale = (total.double().square().mean(1, keepdim=True) + 1e-6).rsqrt()
    exact = total.double() * scale * weight.double()
    smallest = torch.finfo(dtype).smallest_normal
    bound = 1.01 * EPSILON[dtype] * exact.abs().clamp(min=smallest)
    assert bool(((normed.double() - exact).abs() <= bound).all())
