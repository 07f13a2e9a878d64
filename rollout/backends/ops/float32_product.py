"""float32_product: logits that are not rounded to the model's dtype on their way out.

Shape letters: T tokens, K in features, N out features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_HALVES = (torch.bfloat16, torch.float16)


def float32_product(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, float32 [T, N]; no gradient.

    On a CUDA device a product of half-precision numbers leaves its float32 sums as they are. A
    logit of 20 in bfloat16 is rounded by up to 1/16 otherwise, and so is a log-prob. Elsewhere the
    product has the dtype of its factors, and is then cast: no CPU has such a product.
    """
    if not can_keep_sums(x_TK):
        return F.linear(x_TK, weight_NK, bias_N).float()
    out_TN = torch.mm(x_TK, weight_NK.t(), out_dtype=torch.float32)
    return out_TN if bias_N is None else out_TN.add_(bias_N)


def can_keep_sums(x: Tensor) -> bool:
    """Whether torch has a product with float32 sums for such factors: from 2.8 on, on CUDA."""
    return x.is_cuda and x.dtype in _HALVES and hasattr(torch.ops.aten.mm, "dtype")
