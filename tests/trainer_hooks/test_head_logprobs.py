"""head_logprobs: what whole logits give, forward and backward, in chunks of any size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainer_hooks.losses import head_logprobs as module
from trainer_hooks.losses.head_logprobs import Head, head_logprobs, logits_logprobs

NUM_ROWS, WIDTH, VOCABULARY = 7, 6, 11


def head_of(has_bias: bool, scale: float, softcap: float | None) -> Head:
    draws = torch.Generator().manual_seed(3)
    weight = torch.randn(VOCABULARY, WIDTH, generator=draws, dtype=torch.float32)
    bias = torch.randn(VOCABULARY, generator=draws) if has_bias else None
    return Head(weight_VE=weight, bias_V=bias, scale=scale, softcap=softcap)


def plain(
    hidden: torch.Tensor, head: Head, rows: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden, head.weight_VE, head.bias_V) * head.scale
    if head.softcap is not None:
        logits = (logits / head.softcap).tanh() * head.softcap
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs[rows, tokens], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("has_bias", "scale"), [(False, 1.0), (True, 0.5)])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_head_logprobs_equals_whole_logits_forward_and_backward(
    temperature: float,
    softcap: float | None,
    has_bias: bool,
    scale: float,
    chunk_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * VOCABULARY * chunk_rows)
    head = head_of(has_bias, scale, softcap)
    hidden = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([0, 0, 2, 3, 3, 3, 6])  # two samples of one state; states that none uses
    tokens = torch.tensor([1, 1, 4, 0, 10, 5, 7])
    weights = torch.linspace(-1, 2, len(rows)), torch.linspace(1, -1, NUM_ROWS)
    results = []
    for function in (plain, head_logprobs):
        leaves = [x.clone().requires_grad_() for x in (hidden, head.weight_VE)]
        own = replace(head, weight_VE=leaves[1])
        if head.bias_V is not None:
            leaves.append(head.bias_V.clone().requires_grad_())
            own = replace(own, bias_V=leaves[2])
        log_probs, entropies = function(leaves[0], own, rows, tokens, temperature)
        ((log_probs * weights[0]).sum() + (entropies * weights[1]).sum()).backward()
        results.append([log_probs, entropies, *(leaf.grad for leaf in leaves)])
    for own_value, whole in zip(*reversed(results), strict=True):
        torch.testing.assert_close(own_value, whole, rtol=1e-5, atol=1e-6)


def test_head_logprobs_of_an_excluded_token_stay_finite() -> None:
    bias = torch.zeros(VOCABULARY)
    bias[4] = -torch.inf
    head = replace(head_of(False, 1.0, None), bias_V=bias)
    hidden = torch.ones(2, WIDTH, requires_grad=True)
    log_probs, entropies = head_logprobs(hidden, head, torch.tensor([0, 1]), torch.tensor([1, 2]))
    (log_probs.sum() + entropies.sum()).backward()
    assert log_probs.isfinite().all()
    assert entropies.isfinite().all()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_head_logprobs_without_an_entropy_term_has_no_gradient_of_it() -> None:
    head = head_of(False, 1.0, None)
    hidden = torch.randn(2, WIDTH, requires_grad=True)
    log_probs, _ = head_logprobs(hidden, head, torch.tensor([0, 1]), torch.tensor([1, 2]))
    log_probs.sum().backward()
    own = hidden.grad
    again = hidden.detach().clone().requires_grad_()
    plain(again, head, torch.tensor([0, 1]), torch.tensor([1, 2]), 1.0)[0].sum().backward()
    assert own is not None
    torch.testing.assert_close(own, again.grad, rtol=1e-5, atol=1e-6)


def test_logits_logprobs_are_float32_under_autocast() -> None:
    logits = 6.0 * torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    rows, tokens = torch.arange(4), torch.arange(4)
    exact = logits_logprobs(logits, rows, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = logits_logprobs(logits, rows, tokens)
    torch.testing.assert_close(found, exact, rtol=0.0, atol=0.0)
