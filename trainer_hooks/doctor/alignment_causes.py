"""Hypotheses that a log-prob was computed at a wrong position, over padding or with dropout.

Used by `trainer_hooks.doctor.diagnosis`. No function changes the models or the batch.

Shape letters: B rows, T positions, N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from trainer_hooks.doctor.forward import chosen_logprobs, model_logprobs, row_logits
from trainer_hooks.doctor.hypotheses import Case, Hypothesis, rms_of
from trainer_hooks.doctor.tokens import ExaminedTokens

_SHIFT_REMEDY = (
    "column t is the log-prob of token t, which the logits of position t - 1 give: token_logprobs "
    "and collate_rollouts keep to it"
)


def shift_causes(case: Case) -> Iterator[Hypothesis]:
    """Yield two hypotheses: the log-probs stand one column too late, or one column too early."""
    tokens = case.tokens
    for shift, word in ((1, "late"), (-1, "early")):
        columns_N = tokens.column_N - shift  # the column to which this log-prob belongs
        lengths_N = torch.tensor([len(row) for row in tokens.rows])[tokens.row_N]
        is_inside_N = (columns_N >= 1) & (columns_N < lengths_N)
        safe_N = torch.where(is_inside_N, columns_N, tokens.column_N)
        id_N = torch.stack(
            [tokens.rows[row][c] for row, c in zip(tokens.row_N, safe_N, strict=True)]
        )
        logits_NV = torch.cat(
            [
                row_logits(case.trainer_model, tokens_T)[safe_N[tokens.row_N == row] - 1].cpu()
                for row, tokens_T in enumerate(tokens.rows)
            ]
        )
        shifted_N = chosen_logprobs(logits_NV, id_N, case.reference.temperature)
        # At the ends of a row no log-prob belongs to the column. Padding has 0.
        is_empty_N = ~is_inside_N | (case.claimed_N == 0.0)
        yield Hypothesis(
            name="shifted_mask",
            predicted_N=torch.where(is_empty_N, case.claimed_N, shifted_N),
            evidence=f"the log-probs stand one column too {word} for the mask and the tokens",
            remedy=_SHIFT_REMEDY,
        )


def padding_causes(case: Case) -> Iterator[Hypothesis]:
    """Yield hypotheses of faulty passes over padded rows (of unequal lengths) or packed rows."""
    tokens, model = case.tokens, case.trainer_model
    lengths = [len(row) for row in tokens.rows]
    width = max(lengths)

    def cause(name: str, logits_NV: Tensor, evidence: str, remedy: str) -> Hypothesis:
        predicted_N = chosen_logprobs(logits_NV, tokens.id_N, case.reference.temperature)
        return Hypothesis(name=name, predicted_N=predicted_N, evidence=evidence, remedy=remedy)

    if min(lengths) < width:
        for positions in (_right_padded, _right_padded_without_mask):
            yield cause(
                "position_ids",
                tokens.pick(partial(positions, model, tokens, width)),
                "the position ids are those of left padding, on rows padded on the right",
                "pass position_ids_BT of the batch, or none at all",
            )
        yield cause(
            "attention_over_padding",
            tokens.pick(partial(_over_left_padding, model, tokens, width)),
            "rows are padded on the left, and their tokens attend to the padding",
            "pass attention_mask, with position_ids from its cumulative sum; or pad on the right",
        )
    if len(lengths) > 1:
        yield cause(
            "packing",
            _packed(case),
            "rows are concatenated, and each attends to those before it",
            "pass position_ids that begin at 0 in each row, and an attention backend that keeps "
            "rows apart (UpdateSettings of update_policy does both)",
        )


def batch_position_causes(case: Case) -> Iterator[Hypothesis]:
    """Yield the hypothesis that the batch's own position ids and attention mask are wrong.

    Yields nothing if both fit the batch's tokens.
    """
    batch, tokens = case.batch, case.tokens
    expected_BT = torch.arange(batch.tokens_BT.shape[1]).expand_as(batch.position_ids_BT)
    own_BT = expected_BT < batch.lengths_B[:, None]
    if bool(
        (batch.position_ids_BT == expected_BT)[own_BT].all() & batch.attention_mask_BT[own_BT].all()
    ):
        return
    logits_NV = tokens.pick(
        lambda row: row_logits(
            case.trainer_model,
            tokens.rows[row],
            position_ids_T=batch.position_ids_BT[row, : len(tokens.rows[row])],
            attention_mask_T=batch.attention_mask_BT[row, : len(tokens.rows[row])].long(),
        )
    )
    yield Hypothesis(
        name="position_ids",
        predicted_N=chosen_logprobs(logits_NV, tokens.id_N, case.reference.temperature),
        evidence="position_ids_BT or attention_mask_BT of the batch are not those of its tokens",
        remedy="let position ids count from 0 over the tokens, where the attention mask is True",
    )


def dropout_noise(model: nn.Module, case: Case) -> Iterator[Hypothesis]:
    """Yield the hypothesis of dropout, if `model` is in training mode and two passes differ."""
    if not model.training:
        return
    first_N, second_N = (
        model_logprobs(model, case.tokens, case.reference.temperature) for _ in range(2)
    )
    noise_N = first_N - case.reference.trainer_N
    if torch.equal(first_N, second_N):
        return
    yield Hypothesis(
        name="dropout",
        kind="size",
        noise_rms=rms_of(noise_N),
        noise_largest=float(noise_N.abs().max()),
        evidence=(
            "the model is in training mode and two passes over the same tokens differ, by "
            f"{rms_of(noise_N):.2e} nats from a pass without dropout"
        ),
        remedy="call model.eval() for log-probs, or set the dropout rates of its config to 0",
    )


def _right_padded(model: nn.Module, tokens: ExaminedTokens, width: int, row: int) -> Tensor:
    tokens_T = tokens.rows[row]
    mask_T = torch.ones_like(tokens_T)
    positions_T = _left_padded_positions(len(tokens_T), width)
    return row_logits(model, tokens_T, position_ids_T=positions_T, attention_mask_T=mask_T)


def _right_padded_without_mask(
    model: nn.Module, tokens: ExaminedTokens, width: int, row: int
) -> Tensor:
    # Without a mask, transformers starts a new sequence where the position ids jump.
    tokens_T = tokens.rows[row]
    positions_T = _left_padded_positions(len(tokens_T), width)
    return row_logits(model, tokens_T, position_ids_T=positions_T)


def _left_padded_positions(length: int, width: int) -> Tensor:
    return (torch.arange(length) - (width - length)).clamp(min=0)


def _over_left_padding(model: nn.Module, tokens: ExaminedTokens, width: int, row: int) -> Tensor:
    tokens_T = tokens.rows[row]
    padding = torch.zeros(width - len(tokens_T), dtype=torch.int64)
    return row_logits(model, torch.cat([padding, tokens_T]))[len(padding) :]


def _packed(case: Case) -> Tensor:
    tokens = case.tokens
    lengths = torch.tensor([len(row) for row in tokens.rows])
    starts = lengths.cumsum(0) - lengths
    logits_TV = row_logits(case.trainer_model, torch.cat(list(tokens.rows))).float().cpu()
    return logits_TV[starts[tokens.row_N] + tokens.column_N - 1]
