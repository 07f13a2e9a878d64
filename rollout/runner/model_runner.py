"""ModelRunner: runs one StepPlan on the device.

Shape letters: L logit rows, P scored tokens, S sample rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollout.backends.base import Backend
from rollout.backends.forward_batch import SampleResult
from rollout.kv.cache import KVCache
from rollout.models.causal_lm import CausalLM
from rollout.runner.batch_builder import BatchBuilder
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan

# Prompt scoring materialises logits for this many tokens at a time, so that a long prompt with a
# large vocabulary does not need gigabytes at once.
SCORE_CHUNK = 512


class ModelRunner:
    """The only writer of KV bytes."""

    def __init__(
        self, model: CausalLM, backend: Backend, kv: KVCache, builder: BatchBuilder
    ) -> None:
        self._model, self._backend, self._kv, self._builder = model, backend, kv, builder

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Copy blocks, compute the plan's tokens, sample and score. Returns when the result is on
        the host.
        """
        self._builder.apply_changes(plan)
        if len(plan.copy_sources):
            self._kv.copy_blocks(plan.copy_sources, plan.copy_targets)
        wanted = np.concatenate([plan.sample_sources, plan.score_sources])
        logit_indices, place = np.unique(wanted, return_inverse=True)
        batch = self._builder.forward_batch(plan, self._kv, logit_indices.astype(np.int64))
        hidden_LD = self._backend.executor.run(self._model, batch)
        num_samples = len(plan.sample_sources)
        sampled = self._sample(plan, hidden_LD, place[:num_samples])
        scores = self._score(plan, hidden_LD, place[num_samples:])
        return _to_host(sampled, scores)

    def _sample(self, plan: StepPlan, hidden_LD: Tensor, place: np.ndarray) -> SampleResult | None:
        if not len(place):
            return None
        # Only a fork, or a plan that also scores, draws from other than each logit row once and in
        # order.
        used, draw = np.unique(place, return_inverse=True)
        if len(used) != hidden_LD.shape[0]:
            hidden_LD = hidden_LD[torch.from_numpy(used)]
        logits_SV = self._model.compute_logits(hidden_LD)
        if len(draw) != len(used) or not np.array_equal(draw, np.arange(len(used))):
            logits_SV = logits_SV[torch.from_numpy(draw)]
        sampled = self._backend.ops.sample(logits_SV, self._builder.sampling_batch(plan))
        self._builder.keep_last_tokens(plan, sampled.token_ids_S)
        return sampled

    def _score(self, plan: StepPlan, hidden_LD: Tensor, place: np.ndarray) -> list[Tensor | None]:
        parts = []
        for start in range(0, len(place), SCORE_CHUNK):
            end = start + SCORE_CHUNK
            logits_PV = self._model.compute_logits(hidden_LD[torch.from_numpy(place[start:end])])
            targets_P = torch.from_numpy(plan.score_targets[start:end].astype(np.int64))
            targets_P = targets_P.to(logits_PV.device)
            parts.append(self._backend.ops.score(logits_PV, targets_P, plan.score_top_n))
        if not parts:
            return [None, None, None]
        return [
            None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)
        ]


def _to_host(sampled: SampleResult | None, scores: list[Tensor | None]) -> StepOutput:
    """The step's one device-to-host copy."""
    fields = [None] * 5
    if sampled is not None:
        fields = [
            sampled.token_ids_S,
            sampled.is_finite_S,
            sampled.logprobs_S,
            sampled.top_ids_SN,
            sampled.top_logprobs_SN,
        ]
    token_ids, is_finite, *rest = (
        None if t is None else t.cpu().numpy() for t in (*fields, *scores)
    )
    logprobs, top_ids, top_logprobs, score_logprobs, score_top_ids, score_top_logprobs = rest
    return StepOutput(
        token_ids=np.empty(0, dtype=np.int64) if token_ids is None else token_ids,
        is_finite=np.empty(0, dtype=np.bool_) if is_finite is None else is_finite,
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        score_logprobs=score_logprobs,
        score_top_ids=score_top_ids,
        score_top_logprobs=score_top_logprobs,
    )
