"""float32_product: a matrix product whose float32 sums are not rounded to the model's dtype.

Used for logits by `rollout.backends.cuda.ops`, and for a trainer's log-probs by
`trainer_hooks.losses`. Shape letters: T tokens, K in features, N out features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_HALVES = (torch.bfloat16, torch.float16)


def float32_product(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, float32 [T, N]. On a CUDA device a half-precision product keeps
    its float32 sums, and has no gradient. Elsewhere the product is computed in its factors' dtype
    and then cast, because torch has no such product."""
    if not can_keep_sums(x_TK):
        return F.linear(x_TK, weight_NK, bias_N).float()
    # Rounding to bfloat16 would change a logit of 20, and its log-prob, by up to 1/16.
    out_TN = torch.mm(x_TK, weight_NK.t(), out_dtype=torch.float32)
    return out_TN if bias_N is None else out_TN.add_(bias_N)


def can_keep_sums(x: Tensor) -> bool:
    """Return whether torch has a product with float32 sums for a factor `x`. That needs half
    precision, CUDA and torch 2.8 or later."""
    return x.is_cuda and x.dtype in _HALVES and hasattr(torch.ops.aten.mm, "dtype")
