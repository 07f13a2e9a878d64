"""The examined tokens of a batch: their places, versions and sampling parameters.

Used by all modules of `trainer_hooks.doctor` except `report` and `weight_causes`.

Shape letters: B rows of a batch, T positions, N examined tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.requests import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from trainer_hooks.collate import RolloutBatch
from trainer_hooks.rollouts import Rollout, as_rollout

Turns = Sequence[DynamicInferenceRequest]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExaminedTokens:
    """Generated tokens of some rows of a batch, row by row. Names of tensors over tokens end in N.

    `rows`: each row's tokens without padding.
    `turns`: each row's requests, or None if unknown.
    `row_N`, `column_N`: place of the token in the batch.
    `id_N`: token id.
    `version_N`: version of the weights that sampled the token.
    `kv_version_N`: mean version of the KV that the token attended to, float64.
    `behaviour_N`: the engine's log-prob of the token, float64.
    `train_version`: version of the trainer's weights.
    """

    rows: Sequence[Tensor]
    turns: Sequence[Turns] | None
    row_N: Tensor
    column_N: Tensor
    id_N: Tensor
    version_N: Tensor
    kv_version_N: Tensor
    behaviour_N: Tensor
    train_version: int

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.row_N)

    def gather(self, values_BT: Tensor) -> Tensor:
        """Return the entry of each token in `values_BT`, whose rows are `rows`, as float64 [N]."""
        return values_BT[self.row_N, self.column_N].double().cpu()

    def pick(self, logits_of_row: Callable[[int], Tensor]) -> Tensor:
        """Return the logits that predict each token, at the position before it, float32 [N, V].

        `logits_of_row`: returns a row's logits [T, V].
        """
        parts = []
        for row in range(len(self.rows)):
            columns = self.column_N[self.row_N == row]
            logits_TV = logits_of_row(row)
            parts.append(logits_TV[(columns - 1).to(logits_TV.device)].float().cpu())
        return torch.cat(parts)

    def turn_of(self, index: int) -> DynamicInferenceRequest | None:
        """Return the request that generated token `index`, or None if unknown."""
        if self.turns is None:
            return None
        column = int(self.column_N[index])
        for turn in self.turns[int(self.row_N[index])]:
            if len(turn.prompt_tokens) <= column < turn.num_tokens:
                return turn
        return None

    def params_of(self, index: int) -> SamplingParams | None:
        """Return the sampling parameters of token `index`, or None if unknown."""
        turn = self.turn_of(index)
        return None if turn is None else turn.sampling_params

    def num_generated_before(self, index: int) -> int:
        """Return how many tokens the turn of token `index` had generated before.

        Needs a known turn.
        """
        turn = self.turn_of(index)
        assert turn is not None, f"token {index} has no known turn"
        return int(self.column_N[index]) - len(turn.prompt_tokens)


def turns_of_rows(sources: Sequence[DynamicInferenceRequest | Rollout]) -> list[Turns]:
    """Return the requests of each batch row. Each token sequence of `sources` is one row."""
    return [turns for source in sources for turns in as_rollout(source).sequences]


def seen_from(batch: RolloutBatch, version: int) -> RolloutBatch:
    """Return the batch as if trained at `version`. Lags count from it, and may be negative."""
    newer = batch.train_version - version
    return replace(
        batch,
        train_version=version,
        policy_lag_BT=(batch.policy_lag_BT - newer).masked_fill(~batch.mask_BT, 0),
        kv_staleness_BT=(batch.kv_staleness_BT - newer).masked_fill(~batch.mask_BT, 0),
    )


def choose_rows(batch: RolloutBatch, max_tokens: int) -> Tensor:
    """Return the indices of rows spread over the batch, with at most `max_tokens` trained tokens.

    Returns at least one row. Raises ConfigError if the batch has no trained token.
    """
    counts_B = batch.mask_BT.sum(1)
    rows = counts_B.nonzero().flatten()
    if not len(rows):
        raise ConfigError("the mask of the batch is empty: there is no token to examine")
    wanted = max(1, min(len(rows), len(rows) * max_tokens // max(int(counts_B.sum()), 1)))
    chosen = rows[torch.arange(wanted) * len(rows) // wanted]
    num_fitting = int((counts_B[chosen].cumsum(0) <= max_tokens).sum())
    return chosen[: max(num_fitting, 1)]


def examined_tokens(batch: RolloutBatch, turns: Sequence[Turns] | None) -> ExaminedTokens:
    """Return the tokens under the mask of `batch`, except in column 0, which no logits predict."""
    mask_BT = batch.mask_BT.clone()
    mask_BT[:, 0] = False
    row_N, column_N = mask_BT.nonzero(as_tuple=True)
    at = (row_N, column_N)
    version_N = batch.train_version - batch.policy_lag_BT[at].long()
    return ExaminedTokens(
        rows=[row[:n] for row, n in zip(batch.tokens_BT, batch.lengths_B.tolist(), strict=True)],
        turns=turns,
        row_N=row_N,
        column_N=column_N,
        id_N=batch.tokens_BT[at],
        version_N=version_N,
        kv_version_N=version_N.double() - batch.kv_lag_BT[at].double(),
        behaviour_N=batch.behaviour_logprobs_BT[at].double(),
        train_version=batch.train_version,
    )
