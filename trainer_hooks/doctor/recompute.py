"""Logits and log-probs of the examined tokens by one model.

Shape letters: N tokens, C tokens of one row, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer_hooks.doctor.forward import row_logits
from trainer_hooks.doctor.tokens import ExaminedTokens


def chosen_logprobs(logits_NV: Tensor, id_N: Tensor, temperature: float = 1.0) -> Tensor:
    """log_softmax(logits / temperature) of each token, float64 [N]."""
    scaled_NV = logits_NV if temperature == 1.0 else logits_NV / temperature
    chosen_N = scaled_NV.gather(1, id_N[:, None]).squeeze(1)
    return (chosen_N - scaled_NV.logsumexp(dim=1)).double()


def model_logits(model: nn.Module, tokens: ExaminedTokens) -> Tensor:
    """The logits that `model` gives each token to be drawn from, float32 [N, V]."""
    return tokens.pick(lambda row: row_logits(model, tokens.rows[row]))


def model_logprobs(model: nn.Module, tokens: ExaminedTokens, temperature: float) -> Tensor:
    """Log-probs by `model`, float64 [N]; those of a model in float64 are that precise."""
    # Row by row: the logits of all tokens in float64 would be the largest thing in memory.
    parts = []
    for row, tokens_T in enumerate(tokens.rows):
        is_own_N = tokens.row_N == row
        logits_CV = row_logits(model, tokens_T)[tokens.column_N[is_own_N] - 1].cpu()
        if logits_CV.dtype.itemsize < 4:
            logits_CV = logits_CV.float()
        parts.append(chosen_logprobs(logits_CV, tokens.id_N[is_own_N], temperature))
    return torch.cat(parts)
