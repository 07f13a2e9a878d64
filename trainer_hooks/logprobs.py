"""What a trainer recomputes for each token with its own model: log-prob and entropy.

Shape letters: B rollouts, T positions, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, overload

import torch


@overload
def token_logprobs(
    logits_BTV: torch.Tensor, tokens_BT: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor: ...
@overload
def token_logprobs(
    logits_BTV: torch.Tensor,
    tokens_BT: torch.Tensor,
    temperature: float = 1.0,
    *,
    return_entropy: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def token_logprobs(
    logits_BTV: torch.Tensor,
    tokens_BT: torch.Tensor,
    temperature: float = 1.0,
    *,
    return_entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of token t in column t, float32 [B, T], with a gradient; column 0 is 0.

    `logits_BTV[:, t]` predicts token t + 1. The same quantity as the engine's
    `logprobs_mode="temperature"`.
    `return_entropy`: also the entropy of the distribution that token t is drawn from, in nats, over
    the whole vocabulary, with a gradient, as an entropy bonus needs it.
    """
    logits_BTV = logits_BTV[:, :-1].float() / temperature
    chosen_BT = logits_BTV.gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)
    normalizer_BT = logits_BTV.logsumexp(dim=-1)
    logprobs_BT = torch.nn.functional.pad(chosen_BT - normalizer_BT, (1, 0))
    if not return_entropy:
        return logprobs_BT
    expected_BT = (logits_BTV.softmax(dim=-1) * logits_BTV).sum(dim=-1)
    return logprobs_BT, torch.nn.functional.pad(normalizer_BT - expected_BT, (1, 0))


@torch.no_grad()
def token_entropies(logits_BTV: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Entropy of the distribution that token t was drawn from, in column t, float32 [B, T], nats.

    It covers the whole vocabulary, as in TRL and verl. It has no gradient; column 0 is 0.
    """
    probabilities_BTV = (logits_BTV[:, :-1].float() / temperature).softmax(dim=-1)
    entropies_BT = torch.special.entr(probabilities_BTV).sum(dim=-1)
    return torch.nn.functional.pad(entropies_BT, (1, 0))
