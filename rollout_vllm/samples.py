"""SampledTokens: the tokens of a step, collected one by one and returned as arrays.

Used by `rollout_vllm.pipeline` and `rollout_vllm.server.pipeline`. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rollout.step.output import SampleResult

NO_TOP: tuple[Sequence[int], Sequence[float]] = ((), ())


@dataclass(slots=True)
class SampledTokens:
    """Entries of the tokens of a step: request ids, token ids, log-probs, ranks, and the most
    likely tokens as (ids, log-probs)."""

    request_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top: list[tuple[Sequence[int], Sequence[float]]] = field(default_factory=list)

    def add(
        self,
        request_id: int,
        token_id: int,
        logprob: float,
        rank: int,
        top: tuple[Sequence[int], Sequence[float]],
    ) -> None:
        """Add a token. NaN, 0 and NO_TOP stand for values that were not asked for."""
        self.request_ids.append(request_id)
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.ranks.append(rank)
        self.top.append(top)

    def result(self) -> SampleResult:
        """Return the tokens as arrays. Rows with fewer likely tokens are filled up with zeros."""
        num, width = len(self.token_ids), max((len(ids) for ids, _ in self.top), default=0)
        result = SampleResult(
            token_ids_S=np.array(self.token_ids, np.int64),
            is_finite_S=np.ones(num, np.bool_),
            logprobs_S=np.array(self.logprobs, np.float32),
            ranks_S=np.array(self.ranks, np.int32),
        )
        if not width:
            return result
        top_ids, top_logprobs = np.zeros((num, width), np.int64), np.zeros((num, width), np.float32)
        for row, (ids, logprobs) in enumerate(self.top):
            top_ids[row, : len(ids)], top_logprobs[row, : len(ids)] = ids, logprobs
        return replace(result, top_ids_SN=top_ids, top_logprobs_SN=top_logprobs)
