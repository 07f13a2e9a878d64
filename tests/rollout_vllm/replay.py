"""Replay: what transformers computes for each token of a record, by the versions it names.

Shape letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord

GREEDY_MARGIN = 1e-4  # between the logits of the two most likely tokens, if rounding decided


class Replay:
    """Compares records with `model_of(version)`. worst_gap: the largest difference of a log-prob so
    far. num_tokens, num_mixed: tokens compared, and those whose context had several versions.
    `by_token`: compute one token at a time, as transformers continues a recurrent state."""

    def __init__(self, model_of: Callable[[int], Any], *, by_token: bool = False) -> None:
        self._model_of, self._by_token = model_of, by_token
        self.worst_gap, self.num_tokens, self.num_mixed = 0.0, 0, 0

    def check(self, record: DynamicInferenceRequestRecord) -> None:
        """Each token has the log-prob that its policy's weights give over the KV that the record
        says, and is the most likely one where sampling was greedy."""
        for segment in record.requests:
            if segment.num_generated_tokens:
                self._check_segment(segment)

    def _check_segment(self, segment: DynamicInferenceRequest) -> None:
        prompt, generated = list(map(int, segment.prompt_tokens)), list(segment.generated_tokens)
        logprobs_TV = self._logprobs(segment, prompt + generated)
        policy, kv = segment.policy_spans.to_array(), segment.kv_spans.to_array()
        params = segment.sampling_params
        assert params is not None
        for index, token in enumerate(generated):
            position = len(prompt) + index
            where = f"request {segment.request_id}, position {position}"
            assert policy[position] == kv[position - 1], f"{where}: another step sampled it"
            row_V = logprobs_TV[position - 1]
            assert segment.generated_log_probs is not None
            gap = abs(float(segment.generated_log_probs[index]) - float(row_V[token]))
            self.worst_gap = max(self.worst_gap, gap)
            if not params.temperature:
                lead = float(row_V.max() - row_V[token])
                assert lead < GREEDY_MARGIN, f"{where}: {token} is not the most likely, by {lead}"
            self.num_tokens += 1
            self.num_mixed += len({*kv[:position].tolist()}) > 1

    @torch.no_grad()
    def _logprobs(self, segment: DynamicInferenceRequest, tokens: list[int]) -> Tensor:
        """Return the log-probs [T, V] of the next token after each position that has KV."""
        model, rows = self._model_of(0), []
        cache = DynamicCache(config=model.config) if self._by_token else DynamicCache()
        for start, end, version in segment.kv_spans:
            step = 1 if self._by_token else end - start
            for low in range(start, end, step):
                new = torch.tensor([tokens[low : low + step]])
                output = self._model_of(version)(new, past_key_values=cache, use_cache=True)
                rows.append(output.logits[0].double().log_softmax(-1))
        return torch.cat(rows)
