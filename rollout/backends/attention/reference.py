"""ReferenceAttention: the truth of paged attention, with padded copies and one explicit softmax.

Shape letters: T tokens, R rows, H query heads, G key/value heads, D head dim, C padded context.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollout.backends.attention.token_major import TokenMajorCache, write_tokens
from rollout.backends.forward_batch import ForwardBatch, Rotation


class ReferenceAttention(TokenMajorCache):
    """Implements `AttentionBackend`; for checks only: memory grows with T x longest context."""

    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        layer: int,
        batch: ForwardBatch,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """softmax(q k / sqrt(D)) v over positions up to the token's own, in float32; [T, H, D]."""
        q_THD, k_TGD = self.rotate(q_THD, k_TGD, rotation)
        cache = batch.kv[layer]
        write_tokens(cache, k_TGD, v_TGD, batch.slots_T)
        row_T = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
        tables_TM = batch.block_tables_RM[torch.from_numpy(row_T).to(cache.device)].long()
        context_TC2GD = cache[tables_TM].flatten(1, 2).float()
        repeats = q_THD.shape[1] // k_TGD.shape[1]
        k_TCHD = context_TC2GD[:, :, 0].repeat_interleave(repeats, dim=2)
        v_TCHD = context_TC2GD[:, :, 1].repeat_interleave(repeats, dim=2)
        scores_THC = torch.einsum("thd,tchd->thc", q_THD.float(), k_TCHD) * q_THD.shape[2] ** -0.5
        positions_C = torch.arange(scores_THC.shape[2], device=cache.device)
        hidden_T1C = (positions_C > batch.positions_T[:, None])[:, None]
        scores_THC = scores_THC.masked_fill(hidden_T1C, -torch.inf)
        # Slots beyond the context may hold anything, also NaN, which 0 * NaN would let through.
        v_TCHD = v_TCHD.masked_fill(hidden_T1C.transpose(1, 2).unsqueeze(3), 0)
        return torch.einsum("thc,tchd->thd", scores_THC.softmax(-1), v_TCHD).to(q_THD.dtype)
