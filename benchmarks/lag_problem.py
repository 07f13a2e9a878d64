"""A policy over short sequences whose every expectation is a finite sum, with artificial lag.

Shape letters: S policies side by side, B sequences, T positions, V tokens, P parameters.

Logits of position t = own[t] + context[previous token]. `own` stands for the weights that compute
the present token, `context` for what attention reads from the KV cache: a token with policy lag k
and KV lag j is sampled from `own` of version v - k and `context` of version v - k - j.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

NUM_POSITIONS = 6
NUM_TOKENS = 3
KV_LAGS = (0, 2)  # drawn per token, each with equal probability; position 0 has no context


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parameters:
    """One version of S policies."""

    own_STV: torch.Tensor
    context_SVV: torch.Tensor

    @classmethod
    def zeros(cls, num_policies: int) -> Parameters:
        """Uniform policies."""
        return cls(
            own_STV=torch.zeros(num_policies, NUM_POSITIONS, NUM_TOKENS),
            context_SVV=torch.zeros(num_policies, NUM_TOKENS, NUM_TOKENS),
        )

    def requiring_grad(self) -> Parameters:
        """A copy whose tensors collect gradients."""
        return Parameters(
            own_STV=self.own_STV.detach().clone().requires_grad_(),
            context_SVV=self.context_SVV.detach().clone().requires_grad_(),
        )

    def stepped(self, objective: torch.Tensor, learning_rate: float) -> Parameters:
        """One step up the gradient of `objective`, which was computed from these parameters."""
        own, context = torch.autograd.grad(objective, (self.own_STV, self.context_SVV))
        return Parameters(
            own_STV=(self.own_STV + learning_rate * own).detach(),
            context_SVV=(self.context_SVV + learning_rate * context).detach(),
        )

    def drifted(self, scale: float, generator: torch.Generator) -> Parameters:
        """A random step of standard deviation `scale` in every parameter."""
        steps = (
            scale * torch.randn(part.shape, generator=generator)
            for part in (self.own_STV, self.context_SVV)
        )
        own_STV, context_SVV = steps
        return Parameters(
            own_STV=self.own_STV + own_STV, context_SVV=self.context_SVV + context_SVV
        )


def logits_at(
    own: Parameters, context: Parameters, position: int, previous_SB: torch.Tensor
) -> torch.Tensor:
    """Logits [S, B, V] of `position` after `previous_SB`, of which position 0 has none."""
    own_S1V = own.own_STV[:, position, None]
    num_policies, num_rows = previous_SB.shape
    if position == 0:
        return own_S1V.expand(num_policies, num_rows, NUM_TOKENS)
    index_SBV = previous_SB[..., None].expand(num_policies, num_rows, NUM_TOKENS)
    return own_S1V + context.context_SVV.gather(1, index_SBV)


def logprobs(own: Parameters, context: Parameters, tokens_SBT: torch.Tensor) -> torch.Tensor:
    """Log-probs of given tokens, [S, B, T]."""
    columns = []
    for position in range(NUM_POSITIONS):
        previous_SB = tokens_SBT[..., max(position - 1, 0)]
        log_softmax = logits_at(own, context, position, previous_SB).log_softmax(-1)
        chosen = tokens_SBT[..., position, None].expand(*log_softmax.shape[:2], 1)
        columns.append(log_softmax.gather(-1, chosen)[..., 0])
    return torch.stack(columns, dim=-1)


def all_sequences() -> torch.Tensor:
    """Every sequence there is, [V^T, T]."""
    return torch.tensor(list(product(range(NUM_TOKENS), repeat=NUM_POSITIONS)))


def all_kv_lags() -> torch.Tensor:
    """Every pattern of KV lags, equally likely, [patterns, T]."""
    return torch.tensor([(0, *lags) for lags in product(KV_LAGS, repeat=NUM_POSITIONS - 1)])


def rewards(tokens: torch.Tensor) -> torch.Tensor:
    """In [0, 1]: the squared share of positions that count up from 2, modulo V."""
    previous = torch.nn.functional.pad(tokens, (1, 0), value=1)[..., :-1]
    hits = tokens == (previous + 1) % NUM_TOKENS
    return hits.float().mean(dim=-1).square()


def expected_rewards(policy: Parameters) -> torch.Tensor:
    """Exact return of each policy, [S], differentiable."""
    tokens_BT = all_sequences()
    tokens_SBT = tokens_BT.expand(len(policy.own_STV), *tokens_BT.shape)
    probability_SB = logprobs(policy, policy, tokens_SBT).sum(dim=-1).exp()
    return (probability_SB * rewards(tokens_SBT)).sum(dim=-1)


def lagged_logprobs(
    history: list[Parameters], policy_lag: int, tokens_SBT: torch.Tensor, kv_lag_SBT: torch.Tensor
) -> torch.Tensor:
    """Behaviour log-probs [S, B, T] of tokens whose KV lag is given; the newest version is last."""
    own = version_before(history, policy_lag)
    chosen = torch.zeros(tokens_SBT.shape)
    for kv_lag in KV_LAGS:
        context = version_before(history, policy_lag + kv_lag)
        values = logprobs(own, context, tokens_SBT)
        chosen = torch.where(kv_lag_SBT == kv_lag, values, chosen)
    return chosen


def sample(
    history: list[Parameters], policy_lag: int, num_rows: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of a lagged policy and the KV lags they were sampled with, both [S, B, T]."""
    own = version_before(history, policy_lag)
    num_policies = len(own.own_STV)
    shape = (num_policies, num_rows, NUM_POSITIONS)
    draws = torch.randint(len(KV_LAGS), shape, generator=generator)
    kv_lag_SBT = torch.tensor(KV_LAGS)[draws]
    kv_lag_SBT[..., 0] = 0
    tokens_SBT = torch.zeros(shape, dtype=torch.int64)
    for position in range(NUM_POSITIONS):
        previous_SB = tokens_SBT[..., max(position - 1, 0)]
        logits_SBV = torch.zeros(num_policies, num_rows, NUM_TOKENS)
        for kv_lag in KV_LAGS:
            context = version_before(history, policy_lag + kv_lag)
            is_chosen = (kv_lag_SBT[..., position] == kv_lag)[..., None]
            values = logits_at(own, context, position, previous_SB)
            logits_SBV = torch.where(is_chosen, values, logits_SBV)
        uniform = torch.rand(logits_SBV.shape, generator=generator).clamp(min=1e-20)
        tokens_SBT[..., position] = (logits_SBV - (-uniform.log()).log()).argmax(dim=-1)
    return tokens_SBT, kv_lag_SBT


def version_before(history: list[Parameters], lag: int) -> Parameters:
    """The version `lag` updates before the newest; the first one where there is none so old."""
    return history[max(len(history) - 1 - lag, 0)]
