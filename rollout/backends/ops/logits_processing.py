"""Biases, allowed ids and penalties: changes to some samples' logits before they are drawn.

Used by `rollout.worker.model_runner`. Computes in torch on any device. Definitions and order are
vLLM's: allowed ids, then biases and forbidden ids, then the repetition penalty over prompt and
output, then the frequency and presence penalties over the output. Shape letters: S sample rows, V
vocabulary, P history positions, N top-n. LogitsInputs explains its own letters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollout.backends.base import Ops
from rollout.backends.forward_batch import SamplingBatch
from rollout.backends.step_tensors import LogitsInputs
from rollout.step.output import SampleResult


def sample_processed(
    ops: Ops[Any],
    logits_SV: Tensor,
    sampling: SamplingBatch,
    plain: SampleResult[Tensor],
    inputs: LogitsInputs[Tensor],
    history_QP: Tensor,
) -> SampleResult[Tensor]:
    """Draw the samples of `inputs` again, from processed logits. Return `plain` with their new
    results.

    `plain` is the result of `ops.sample(logits, sampling)`, which all other samples keep. In the
    modes raw and temperature, and at temperature 0, log-probs are of the logits before processing.
    A sample is finite if its logits are finite both before and after processing. `history_QP` has
    the tokens of the Q samples with penalties.
    """
    samples_K = inputs.samples_K
    logits_KV = logits_SV.index_select(0, samples_K).float()
    drawn = ops.sample(
        process_logits(logits_KV.clone(), inputs, history_QP), sampling.select(samples_K)
    )
    result = replace(
        plain,
        token_ids_S=plain.token_ids_S.index_copy(0, samples_K, drawn.token_ids_S),
        is_finite_S=plain.is_finite_S.index_copy(
            0, samples_K, drawn.is_finite_S & plain.is_finite_S[samples_K]
        ),
    )
    if plain.logprobs_S is not None and drawn.logprobs_S is not None:
        unprocessed_U = inputs.unprocessed_U
        scaled_UV = logits_KV[unprocessed_U] * inputs.inverse_temperature_U.unsqueeze(1)
        token_ids_U = drawn.token_ids_S[unprocessed_U]
        logprobs_U = ops.score(scaled_UV, token_ids_U, 0).logprobs_P
        if plain.top_ids_SN is not None and plain.top_logprobs_SN is not None:
            samples_U = samples_K[unprocessed_U]
            top_UN = plain.top_ids_SN[samples_U], plain.top_logprobs_SN[samples_U]
            logprobs_U = _as_in_top(logprobs_U, token_ids_U, *top_UN)
        logprobs_K = drawn.logprobs_S.index_copy(0, unprocessed_U, logprobs_U)
        result = replace(result, logprobs_S=plain.logprobs_S.index_copy(0, samples_K, logprobs_K))
    if plain.top_ids_SN is not None and plain.top_logprobs_SN is not None:
        assert drawn.top_ids_SN is not None
        assert drawn.top_logprobs_SN is not None
        processed_R = inputs.processed_R
        samples_R = samples_K[processed_R]
        result = replace(
            result,
            top_ids_SN=plain.top_ids_SN.index_copy(0, samples_R, drawn.top_ids_SN[processed_R]),
            top_logprobs_SN=plain.top_logprobs_SN.index_copy(
                0, samples_R, drawn.top_logprobs_SN[processed_R]
            ),
        )
    return result


def _as_in_top(
    logprobs_U: Tensor, token_ids_U: Tensor, top_ids_UN: Tensor, top_logprobs_UN: Tensor
) -> Tensor:
    """Return the log-probs. A token in the top-n gets the top-n's value, so that both report the
    same number."""
    is_token_UN = top_ids_UN == token_ids_U.unsqueeze(1)
    of_token_U = torch.where(is_token_UN, top_logprobs_UN, 0).sum(1)
    return torch.where(is_token_UN.any(1), of_token_U, logprobs_U)


def process_logits(logits_KV: Tensor, inputs: LogitsInputs[Tensor], history_QP: Tensor) -> Tensor:
    """Apply allowed ids, biases and penalties to `logits_KV`, float32, in place. Return
    `logits_KV`."""
    if inputs.limited_A.numel():
        at_C, ids_C = inputs.allowed_at_C, inputs.allowed_ids_C
        limited_AV = logits_KV[inputs.limited_A]
        allowed_AV = torch.full_like(limited_AV, -torch.inf)
        allowed_AV[at_C, ids_C] = limited_AV[at_C, ids_C]
        logits_KV[inputs.limited_A] = allowed_AV
    if inputs.bias_at_B.numel():
        at = (inputs.bias_at_B, inputs.bias_ids_B)
        logits_KV.index_put_(at, inputs.biases_B, accumulate=True)
    if inputs.penalized_Q.numel():
        logits_KV[inputs.penalized_Q] = _penalized(
            logits_KV[inputs.penalized_Q],
            history_QP,
            inputs.lengths_Q.unsqueeze(1),
            inputs.num_prompt_Q.unsqueeze(1),
            inputs.penalties_Q3,
        )
    return logits_KV


def _penalized(
    logits_QV: Tensor,
    history_QP: Tensor,
    lengths_Q1: Tensor,
    num_prompt_Q1: Tensor,
    penalties_Q3: Tensor,
) -> Tensor:
    """Return the logits with penalties for the tokens of the histories."""
    # The cost grows with the histories, not with the vocabulary. A token's new logit is computed
    # once for each of its positions, always with the same result.
    positions_P = torch.arange(history_QP.shape[1], device=history_QP.device)
    is_known_QP = positions_P < lengths_Q1
    is_output_QP = is_known_QP & (positions_P >= num_prompt_Q1)
    known_QP = torch.where(is_known_QP, history_QP, history_QP[:, :1])
    # Prompt tokens become an id beyond the vocabulary, which no search below finds.
    outputs_QP = torch.where(is_output_QP, history_QP, logits_QV.shape[1]).sort(1).values
    counts_QP = torch.searchsorted(outputs_QP, known_QP, right=True)
    counts_QP -= torch.searchsorted(outputs_QP, known_QP)
    ids_QP = known_QP.long()
    repetition_Q1, presence_Q1, frequency_Q1 = penalties_Q3.split(1, dim=1)
    values_QP = logits_QV.gather(1, ids_QP)
    values_QP = torch.where(values_QP > 0, values_QP / repetition_Q1, values_QP * repetition_Q1)
    values_QP -= frequency_Q1 * counts_QP
    values_QP -= presence_Q1 * (counts_QP > 0)
    return logits_QV.scatter(1, ids_QP, values_QP)
