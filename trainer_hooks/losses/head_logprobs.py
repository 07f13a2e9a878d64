"""Log-probs and entropies of final hidden states, without ever holding all logits.

Used by `trainer_hooks.update.tree_pass`. `trainer_hooks.update.lean_passes` uses
`gradient_in_place`. All logits of a batch take more memory than anything else of a trainer, so
logits are computed in chunks of tokens. The backward pass computes them again and writes to the
`grad` of the head's weight.

Shape letters: R hidden states, C hidden states of a chunk, E hidden size, V vocabulary, M pairs of
a hidden state and a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.backends.ops.float32_product import float32_product

_CHUNK_BYTES = 16 << 20  # of float32 logits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """A language-model head: softcap * tanh(scale * (h @ weight.T + bias) / softcap).

    `scale`: the factor by which Granite and Cohere multiply logits.
    `softcap`: the bound of Gemma's logits. None leaves logits unbounded.
    """

    weight_VE: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Return the logits of hidden states, float32 [R, V]. No-grad mode only."""
        return _logits(hidden_RE, self.weight_VE, self.bias_V, self, temperature=1.0)


def head_logprobs(
    hidden_RE: Tensor, head: Head, rows_M: Tensor, tokens_M: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-probs of `tokens_M` [M] and entropies in nats [R], float32, with gradients.

    Log-probs and entropies belong to softmax(logits / temperature), as in `token_logprobs`.
    `rows_M`: index of the hidden state that predicts each token, ascending.
    The backward pass adds the gradient of the head's weight to its `grad` in place, so use
    `backward()`, not torch.autograd.grad.
    """
    hidden_RE = hidden_RE.to(head.weight_VE.dtype)
    # Under autocast as well: rounded to bfloat16, a logit of 20 would be off by up to 1/16.
    with torch.autocast(hidden_RE.device.type, enabled=False):
        log_probs_M, entropies_R = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_RE, head.weight_VE, head.bias_V, head, rows_M, tokens_M, temperature
        )
    return log_probs_M, entropies_R


def logits_logprobs(
    logits_RV: Tensor, rows_M: Tensor, tokens_M: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the log-probs and entropies of `head_logprobs`, from logits already computed."""
    logits_RV = logits_RV.float() / temperature
    logits_RV = logits_RV.clamp(min=torch.finfo(torch.float32).min)  # of excluded tokens
    normalizers_R = logits_RV.logsumexp(dim=-1)
    # Autocast rounds the factors of vecdot to bfloat16: an entropy would be off by tenths.
    with torch.autocast(logits_RV.device.type, enabled=False):
        expected_R = torch.linalg.vecdot(logits_RV.softmax(dim=-1), logits_RV)
    return logits_RV[rows_M, tokens_M] - normalizers_R[rows_M], normalizers_R - expected_R


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        head: Head,
        rows_M: Tensor,
        tokens_M: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_RE, weight_VE, bias_V, rows_M, tokens_M)
        ctx.head, ctx.temperature = head, temperature
        ctx.set_materialize_grads(False)
        log_probs_M = hidden_RE.new_empty(len(rows_M), dtype=torch.float32)
        entropies_R = hidden_RE.new_empty(len(hidden_RE), dtype=torch.float32)
        for part, pairs in _chunks(len(hidden_RE), len(weight_VE), rows_M):
            logits_CV = _logits(hidden_RE[part], weight_VE, bias_V, head, temperature)
            exp_CV, sums_C1, normalizers_C = _softmax_parts(logits_CV)
            here_M = rows_M[pairs] - part.start
            chosen_M = logits_CV[here_M, tokens_M[pairs]]
            log_probs_M[pairs] = chosen_M - normalizers_C[here_M]
            expected_C = torch.linalg.vecdot(exp_CV, logits_CV) / sums_C1[:, 0]
            entropies_R[part] = normalizers_C - expected_C
        return log_probs_M, entropies_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RE, weight_VE, bias_V, rows_M, tokens_M = ctx.saved_tensors
        # d logit_v = sum over pairs of g (1[v chosen] - p_v), - g_entropy p_v (log p_v + H)
        grad_M, grad_entropy_R = grads
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_RE = torch.empty_like(hidden_RE) if needs_hidden else None
        total_VE, returned_VE = gradient_in_place(weight_VE) if needs_weight else (None, None)
        grad_bias_V = torch.zeros_like(bias_V) if needs_bias else None
        head, temperature = ctx.head, ctx.temperature
        for part, pairs in _chunks(len(hidden_RE), len(weight_VE), rows_M):
            hidden_CE, here_M = hidden_RE[part], rows_M[pairs] - part.start
            logits_CV = _logits(hidden_CE, weight_VE, bias_V, head, temperature)
            probs_CV, sums_C1, normalizers_C = _softmax_parts(logits_CV)
            probs_CV.div_(sums_C1)
            weights_C1 = logits_CV.new_zeros(len(hidden_CE), 1)
            if grad_M is not None:
                weights_C1[:, 0].index_add_(0, here_M, grad_M[pairs])
            if grad_entropy_R is None:
                grad_CV = probs_CV.mul_(-weights_C1)
            else:
                log_probs_CV = logits_CV - normalizers_C[:, None]
                entropies_C1 = -torch.linalg.vecdot(probs_CV, log_probs_CV)[:, None]
                inner_CV = log_probs_CV.add_(entropies_C1).mul_(grad_entropy_R[part, None])
                grad_CV = probs_CV.mul_(inner_CV.add_(weights_C1).neg_())
            if grad_M is not None:
                grad_CV.index_put_((here_M, tokens_M[pairs]), grad_M[pairs], accumulate=True)
            grad_CV.mul_(head.scale / temperature)
            if head.softcap is not None:  # the derivative of tanh
                grad_CV.mul_(1.0 - (logits_CV * (temperature / head.softcap)).square_())
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0).to(grad_bias_V.dtype)
            grad_CV = grad_CV.to(hidden_CE.dtype)
            if grad_hidden_RE is not None:
                torch.mm(grad_CV, weight_VE, out=grad_hidden_RE[part])
            if total_VE is not None:
                total_VE.addmm_(grad_CV.t(), hidden_CE)
        return grad_hidden_RE, returned_VE, grad_bias_V, None, None, None, None


def gradient_in_place(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a tensor to add the gradient of `weight` to, and the value for backward() to return.

    For a leaf without hooks these are `weight.grad`, created if missing, and None. For other
    weights both are the same new tensor of zeros.
    """
    # A gradient of its own would take as much memory as the weight until the backward pass ends.
    if weight.is_leaf and not (weight._backward_hooks or weight._post_accumulate_grad_hooks):
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        return weight.grad, None
    zeros = torch.zeros_like(weight)
    return zeros, zeros


def _chunks(num_rows: int, vocabulary: int, rows_M: Tensor) -> Iterator[tuple[slice, slice]]:
    size = max(1, _CHUNK_BYTES // (4 * vocabulary))
    starts = range(0, num_rows, size)
    bounds = torch.tensor([*starts, num_rows], device=rows_M.device)
    edges = torch.searchsorted(rows_M, bounds).tolist()
    for index, start in enumerate(starts):
        yield slice(start, min(start + size, num_rows)), slice(edges[index], edges[index + 1])


def _logits(
    hidden_CE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, head: Head, temperature: float
) -> Tensor:
    """Return logits / temperature, float32. -inf (excluded tokens) becomes the lowest float."""
    logits_CV = float32_product(hidden_CE, weight_VE, bias_V)
    if head.scale != 1.0:
        logits_CV.mul_(head.scale)
    if head.softcap is not None:
        logits_CV.div_(head.softcap).tanh_().mul_(head.softcap)
    if temperature != 1.0:
        logits_CV.div_(temperature)
    return logits_CV.clamp_(min=torch.finfo(torch.float32).min)


def _softmax_parts(logits_CV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    most_C1 = logits_CV.amax(dim=-1, keepdim=True)
    exp_CV = (logits_CV - most_C1).exp_()
    sums_C1 = exp_CV.sum(dim=-1, keepdim=True)
    return exp_CV, sums_C1, (most_C1 + sums_C1.log())[:, 0]
