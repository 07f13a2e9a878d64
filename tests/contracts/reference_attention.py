"""ReferenceAttention: paged attention with padded copies and one explicit softmax, as a reference.

Tests compare every other attention with it. Writes only the KV cache it is given.

Shape letters: T tokens, R rows, H query heads, G key/value heads, D head dim, C padded context.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollout.backends.cpu.torch_sdpa import TorchSdpaAttention, places_of, write_tokens
from rollout.backends.forward_batch import PLAIN, AttentionTraits, ForwardBatch, Rotation


class ReferenceAttention(TorchSdpaAttention):
    """Implements `AttentionBackend`, with the cache layout of TorchSdpaAttention.

    Its memory grows with T times the longest context.
    """

    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        layer: int,
        batch: ForwardBatch,
        rotation: Rotation | None = None,
        traits: AttentionTraits = PLAIN,
    ) -> Tensor:
        """Return softmax(q k / sqrt(D)) v over positions up to the token's own, [T, H, D].

        Where the cache holds K alone, the result has as many dims as `v_TGD`.
        """
        q_THD, k_TGD = self.rotate(q_THD, k_TGD, rotation)
        cache = batch.kv[layer]
        write_tokens(cache, k_TGD, v_TGD, places_of(batch))
        row_T = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
        tables_TM = batch.block_tables_RM[torch.from_numpy(row_T).to(cache.device)].long()
        context_TC2GD = cache[tables_TM].flatten(1, 2).float()
        repeats = q_THD.shape[1] // k_TGD.shape[1]
        k_TCHD = context_TC2GD[:, :, 0].repeat_interleave(repeats, dim=2)
        v_TCGD = context_TC2GD[:, :, -1, :, : v_TGD.shape[2]]
        v_TCHD = v_TCGD.repeat_interleave(repeats, dim=2)
        scores_THC = torch.einsum("thd,tchd->thc", q_THD.float(), k_TCHD)
        scores_THC = scores_THC * traits.scale_of(q_THD.shape[2])
        if traits.softcap is not None:
            scores_THC = (scores_THC / traits.softcap).tanh() * traits.softcap
        positions_C = torch.arange(scores_THC.shape[2], device=cache.device)
        ages_TC = batch.positions_T[:, None] - positions_C
        hidden_TC = ages_TC < 0
        if traits.window is not None:
            hidden_TC = hidden_TC | (ages_TC >= traits.window)
        scores_THC = scores_THC.masked_fill(hidden_TC[:, None], -torch.inf)
        # Slots beyond the context may hold anything, also NaN, which 0 * NaN would let through.
        v_TCHD = v_TCHD.masked_fill(hidden_TC[:, :, None, None], 0)
        weights_THC = _weights(scores_THC, traits.sinks_H)
        return torch.einsum("thc,tchd->thd", weights_THC, v_TCHD).to(q_THD.dtype)


def _weights(scores_THC: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Return the softmax over positions and the head's sink, without the sink's own weight."""
    if sinks_H is None:
        return scores_THC.softmax(-1)
    sinks_TH1 = sinks_H.float().expand(scores_THC.shape[0], -1)[:, :, None]
    return torch.cat((scores_THC, sinks_TH1), dim=-1).softmax(-1)[:, :, :-1]
