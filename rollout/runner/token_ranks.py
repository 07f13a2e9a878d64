"""Ranks: the places of tokens among all tokens, by their logits."""

from __future__ import annotations

import torch
from torch import Tensor


def token_ranks(logits_SV: Tensor, token_ids_S: Tensor) -> Tensor:
    """1 + the number of tokens of the row with a larger logit, int32 [S]. Equal logits share a
    rank, so that every largest one has rank 1.
    """
    chosen_S1 = logits_SV.gather(1, token_ids_S.unsqueeze(1))
    return (logits_SV > chosen_S1).sum(1, dtype=torch.int32) + 1
