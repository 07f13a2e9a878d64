"""Log-probs and entropies of a batch's tokens from a trainer's own logits.

Used by `trainer_hooks.update.micro_batches` and by users' training loops. No function has side
effects.

Shape letters: B rows, T positions, R = B * T, V vocabulary, E hidden size.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from rollout.backends.ops.float32_product import float32_product


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
    """Return the log-prob of token t in column t, float32 [B, T], with a gradient. Column 0 is 0.

    `logits_BTV[:, t]` predicts token t + 1. The engine's log-probs with
    `logprobs_mode="temperature"` are the same quantity.
    `return_entropy`: True also returns the entropies, for an entropy bonus. Column t is the entropy
    in nats of the distribution of token t over the whole vocabulary, with a gradient.
    """
    logits_BTV = logits_BTV[:, :-1].float() / temperature
    chosen_BT = logits_BTV.gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)
    normalizer_BT = logits_BTV.logsumexp(dim=-1)
    logprobs_BT = torch.nn.functional.pad(chosen_BT - normalizer_BT, (1, 0))
    if not return_entropy:
        return logprobs_BT
    # A token that the model excludes, with a logit of -inf, adds 0, not 0 * -inf.
    finite_BTV = logits_BTV.clamp(min=torch.finfo(logits_BTV.dtype).min)
    expected_BT = (logits_BTV.softmax(dim=-1) * finite_BTV).sum(dim=-1)
    return logprobs_BT, torch.nn.functional.pad(normalizer_BT - expected_BT, (1, 0))


@torch.no_grad()
def token_entropies(logits_BTV: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the entropy of the distribution of token t in column t, float32 [B, T], in nats.

    The entropy covers the whole vocabulary, as in TRL and verl. It has no gradient. Column 0 is 0.
    """
    probabilities_BTV = (logits_BTV[:, :-1].float() / temperature).softmax(dim=-1)
    entropies_BT = torch.special.entr(probabilities_BTV).sum(dim=-1)
    return torch.nn.functional.pad(entropies_BT, (1, 0))


def head_logits(hidden_BTE: Tensor, weight_VE: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """Return logits of final hidden states as the engine computes them, float32 [B, T, V].

    The logits have a gradient. On a CUDA device, half-precision products keep their float32 sums. A
    model's own head rounds these sums to its dtype, so its log-probs differ from the engine's. On
    other devices the result is the head's product, cast to float32.
    """
    hidden_RE = hidden_BTE.reshape(-1, hidden_BTE.shape[-1])
    logits_RV: Tensor = _HeadLogits.apply(hidden_RE, weight_VE, bias_V)  # type: ignore[no-untyped-call]
    return logits_RV.view(*hidden_BTE.shape[:-1], -1)


class _HeadLogits(torch.autograd.Function):
    """`float32_product` with a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_RE: Tensor, weight_VE: Tensor, bias_V: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden_RE, weight_VE)
        ctx.bias_dtype = None if bias_V is None else bias_V.dtype
        return float32_product(hidden_RE, weight_VE, bias_V)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RE, weight_VE = ctx.saved_tensors
        grad_RV = grads[0].to(hidden_RE.dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            grad_RV @ weight_VE if needs_hidden else None,
            grad_RV.t() @ hidden_RE if needs_weight else None,
            grads[0].sum(0).to(ctx.bias_dtype) if needs_bias else None,
        )
