"""The oracle of the sampling contract: draws and log-probs in plain Python and float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.backends.forward_batch import MODE_CODES, SamplingBatch
from rollout.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One row's sampling parameters."""

    uniform: float = 0.5
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    mode: str = "raw"

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p > 0 or self.min_p > 0


def batch_of(draws: Sequence[Draw], *, logprobs: bool = True, top_n: int = 0) -> SamplingBatch:
    """Return the draws as tensors, with flags as the model runner sets them."""
    return SamplingBatch(
        uniforms_S=torch.tensor([d.uniform for d in draws], dtype=torch.float64),
        temperature_S=torch.tensor([d.temperature for d in draws], dtype=torch.float32),
        top_k_S=torch.tensor([d.top_k for d in draws], dtype=torch.int64),
        top_p_S=torch.tensor([d.top_p for d in draws], dtype=torch.float32),
        min_p_S=torch.tensor([d.min_p for d in draws], dtype=torch.float32),
        mode_S=torch.tensor([MODE_CODES[d.mode] for d in draws], dtype=torch.int8),
        all_greedy=all(d.temperature == 0 for d in draws),
        any_greedy=any(d.temperature == 0 for d in draws),
        any_truncation=any(d.truncates for d in draws),
        any_logprobs=logprobs,
        top_n=top_n,
    )


def processed_logits(
    logits_V: NDArray[np.float64],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
) -> NDArray[np.float64]:
    """Return the logits for the next token of `output`, token by token as vLLM defines it.

    The end tokens are those that `params` names.
    """
    logits_V, bias = logits_V.copy(), dict(params.logit_bias or ())
    ends = {params.termination_id, *(params.stop_token_ids or ())}
    for token in range(len(logits_V)):
        value = logits_V[token] + bias.get(token, 0.0)
        is_late = len(output) < params.min_tokens and token in ends
        if is_late or token not in (params.allowed_token_ids or [token]):
            value = -np.inf
        if token in (*prompt, *output):
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        count = list(output).count(token)
        value -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        logits_V[token] = value
    return logits_V


def softmax(logits_V: NDArray[np.float64]) -> NDArray[np.float64]:
    weights_V = np.exp(logits_V - logits_V.max())
    return weights_V / weights_V.sum()


def kept_tokens(logits_V: NDArray[np.floating], draw: Draw) -> list[int]:
    """Return the ids that top-k, then top-p, then min-p keep; ranked, lowest id first if equal."""
    probabilities = softmax(logits_V.astype(np.float64) / draw.temperature)
    ranked = sorted(range(len(logits_V)), key=lambda token: (-logits_V[token], token))
    if draw.top_k > 0:
        ranked = ranked[: draw.top_k]
    if 0 < draw.top_p < 1:
        total, mass, kept = sum(probabilities[t] for t in ranked), 0.0, []
        for token in ranked:
            if mass >= np.float32(draw.top_p) * total:
                break
            kept.append(token)
            mass += probabilities[token]
        ranked = kept
    floor = np.float32(draw.min_p) * probabilities.max()
    return [token for token in ranked if probabilities[token] >= floor * (1 - 1e-6)]


def probabilities(logits_V: NDArray[np.floating], draw: Draw) -> NDArray[np.float64]:
    """Return the distribution that a row is drawn from, by id."""
    full_V = softmax(logits_V.astype(np.float64) / np.float32(draw.temperature))
    kept = kept_tokens(logits_V, draw)
    result_V = np.zeros_like(full_V)
    result_V[kept] = full_V[kept]
    return result_V / result_V.sum()


def logprobs(logits_V: NDArray[np.floating], draw: Draw) -> NDArray[np.float64]:
    """Return the log-prob of every id in the row's mode."""
    logits_V = logits_V.astype(np.float64)
    with np.errstate(divide="ignore"):
        if draw.mode == "raw" or draw.temperature == 0:
            return np.log(softmax(logits_V))
        if draw.mode == "temperature":
            return np.log(softmax(logits_V / np.float32(draw.temperature)))
        return np.log(probabilities(logits_V, draw))
