"""The log-probs that a batch should have, given the weights versions stamped on its tokens.

Used by the modules `diagnosis`, `hypotheses`, `facts` and `sampling_causes` of
`trainer_hooks.doctor`.

Shape letters: N tokens, T positions of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollout.requests import DynamicInferenceRequest
from trainer_hooks.doctor.forward import chosen_logprobs, model_logits, replayed_logits
from trainer_hooks.doctor.tokens import ExaminedTokens

# Tolerance for equal means of KV versions, in float32 (a batch) or float64 (a request).
_MEAN_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """Log-probs at `temperature`, float64 [N], and their logits.

    `trainer_N`: computed by the trainer's weights.
    `sampler_N`: computed by the weights that sampled each token, over KV of the same weights.
    `stamped_N`: computed by the weights that sampled each token, over KV of the stamped versions.
    `is_known_N`: False where weights of a needed version are missing. There `sampler_N` repeats
    `trainer_N`, or `stamped_N` repeats `sampler_N`.
    `logits_NV`: the logits of `stamped_N`, before the temperature and any reshaping.
    """

    trainer_N: Tensor
    sampler_N: Tensor
    stamped_N: Tensor
    is_known_N: Tensor
    logits_NV: Tensor
    temperature: float


def reference_of(
    tokens: ExaminedTokens, models: Mapping[int, nn.Module], temperature: float
) -> Reference:
    """Return the log-probs that the tokens' version stamps imply."""
    logits_NV = model_logits(models[tokens.train_version], tokens)
    trainer_N = chosen_logprobs(logits_NV, tokens.id_N, temperature)
    has_weights_N = tokens.version_N == tokens.train_version
    for version in sorted(set(tokens.version_N.tolist()) & set(models) - {tokens.train_version}):
        is_own_N = tokens.version_N == version
        logits_NV[is_own_N] = model_logits(models[version], tokens)[is_own_N]
        has_weights_N |= is_own_N
    sampler_N = chosen_logprobs(logits_NV, tokens.id_N, temperature)
    is_fresh_N = (tokens.kv_version_N - tokens.version_N).abs() < _MEAN_TOLERANCE
    is_replayed_N = replay_old_contexts(tokens, models, ~is_fresh_N, logits_NV)
    return Reference(
        trainer_N=trainer_N,
        sampler_N=sampler_N,
        stamped_N=chosen_logprobs(logits_NV, tokens.id_N, temperature),
        is_known_N=has_weights_N & (is_fresh_N | is_replayed_N),
        logits_NV=logits_NV,
        temperature=temperature,
    )


def replay_old_contexts(
    tokens: ExaminedTokens, models: Mapping[int, nn.Module], is_wanted_N: Tensor, logits_NV: Tensor
) -> Tensor:
    """Overwrite `logits_NV` for the wanted tokens with logits over KV of the stamped versions.

    Returns where this was possible, bool [N]. A replay needs the token's turn, models of all
    versions of its KV, and KV that was not recomputed later.
    """
    is_replayed_N = torch.zeros_like(is_wanted_N)
    if tokens.turns is None:
        return is_replayed_N
    for row, turns in enumerate(tokens.turns):
        for turn in turns:
            start, end = len(turn.prompt_tokens), turn.num_tokens
            is_own_N = (tokens.row_N == row) & (tokens.column_N >= start) & (tokens.column_N < end)
            own = (is_own_N & is_wanted_N).nonzero().flatten()
            kv_versions_T = kv_versions_of(turn)
            if not len(own) or not set(kv_versions_T.tolist()) <= set(models):
                continue
            logits_TV = replayed_logits(models, tokens.rows[row][:end], kv_versions_T.tolist())
            columns = tokens.column_N[own]
            # If KV was recomputed later, the mean of its versions is not the stamped one.
            means = kv_versions_T.double().cumsum(0)[columns - 1] / columns
            fits = (means - tokens.kv_version_N[own]).abs() < _MEAN_TOLERANCE
            fits &= kv_versions_T[columns - 1] == tokens.version_N[own]
            logits_NV[own[fits]] = logits_TV[columns[fits] - 1].float().cpu()
            is_replayed_N[own[fits]] = True
    return is_replayed_N


def kv_versions_of(turn: DynamicInferenceRequest) -> Tensor:
    """Return the version that wrote the KV of each position of a finished request, int64 [T]."""
    version = turn.completed_at_version or 0
    return version - turn.staleness_at(version)[1].long()
