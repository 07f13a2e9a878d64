"""token_logprobs and token_entropies, which a trainer recomputes."""

import math

import torch
from torch.testing import assert_close

from trainer_hooks import token_entropies, token_logprobs


def test_token_logprobs_column_t_belongs_to_token_t() -> None:
    # Position 0 predicts token 1 with odds 3 : 1, position 1 predicts token 2 with 1 : 1.
    logits = torch.tensor([[[math.log(3.0), 0.0], [5.0, 5.0], [9.0, -9.0]]])
    logprobs = token_logprobs(logits, torch.tensor([[1, 0, 1]]))
    assert_close(logprobs, torch.tensor([[0.0, math.log(0.75), math.log(0.5)]]))


def test_token_logprobs_divide_the_logits_by_temperature() -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    expected = torch.log_softmax(logits / 0.5, dim=-1)[:, :-1].gather(-1, tokens[:, 1:, None])
    assert_close(token_logprobs(logits, tokens, 0.5)[:, 1:], expected.squeeze(-1))


def test_token_logprobs_return_entropy_of_the_whole_distribution_with_a_gradient() -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, 5, 7, requires_grad=True), torch.randint(7, (2, 5))
    logprobs, entropies = token_logprobs(logits, tokens, 0.7, return_entropy=True)
    assert_close(logprobs, token_logprobs(logits, tokens, 0.7))
    assert_close(entropies, token_entropies(logits, 0.7))
    (gradient,) = torch.autograd.grad(entropies.sum(), logits)
    distribution = torch.distributions.Categorical(logits=logits[:, :-1] / 0.7)
    (expected,) = torch.autograd.grad(distribution.entropy().sum(), logits)
    assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
