"""HistoryOracle: the expected tokens after any history of weight updates, by the trainer's own
models.

Shape letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from rollout import DynamicInferenceRequest
from tests.tiny_models import Logits, Margins, possible_tokens, sampled_token, tokens_of


class HistoryOracle:
    """`model_of` a version. `recomputed`: the versions whose updates threw the KV away; the others
    left it as the earlier weights had written it.
    """

    def __init__(self, model_of: Callable[[int], Any], recomputed: Collection[int] = ()) -> None:
        self._model_of, self._recomputed = model_of, recomputed
        self.margins = Margins()

    def check(self, request: DynamicInferenceRequest) -> None:
        """The versions only rise, and each token is what its version's weights make of a context
        that was written as the history says; the context's versions are told so, too.
        """
        versions = request.policy_versions.tolist()
        assert versions == sorted(versions)
        logits_TV, oldest_T = self._replay(request, versions)
        assert list(request.context_kv_version_min or []) == oldest_T
        num_prompt, params = len(request.prompt_tokens), request.sampling_params
        for index, token in enumerate(request.generated_tokens):
            self.margins.num_tokens += 1
            draw = (logits_TV[index], params, request.seed or 0, num_prompt + index)
            if token == sampled_token(*draw):
                continue
            where = f"request {request.request_id}, token {index}: {token}"
            outcomes = possible_tokens(*draw)
            assert token in outcomes, f"{where}, possible were {outcomes}; versions {versions}"
            self.margins.exceptions.append(where)

    @torch.no_grad()
    def _replay(
        self, request: DynamicInferenceRequest, versions: list[int]
    ) -> tuple[Logits, list[int]]:
        """(logits [T, V] of the generated tokens, the oldest version in the context of each)."""
        tokens, num_prompt = torch.tensor([tokens_of(request)]), len(request.prompt_tokens)
        cache, num_written, oldest, before = DynamicCache(), 0, versions[0], versions[0]
        moved_at = num_resumed(request)
        rows: list[Logits] = []
        oldest_T: list[int] = []
        for start, end in _runs(versions, moved_at):
            version = versions[start]
            is_recomputed = any(before < recomputed <= version for recomputed in self._recomputed)
            if is_recomputed or start == moved_at:
                cache, num_written, oldest = DynamicCache(), 0, version
            # The last token of a run is written by the step that samples the next one.
            stop = num_prompt + end - 1
            new = tokens[:, num_written:stop]
            output = self._model_of(version)(new, past_key_values=cache, use_cache=True)
            rows.append(output.logits[0, -(end - start) :].double().numpy())
            oldest_T += [oldest] * (end - start)
            num_written, before = stop, version
        return np.concatenate(rows), oldest_T


def num_resumed(request: DynamicInferenceRequest) -> int:
    """Tokens of an earlier engine, which alone knew when they came. The next one wrote the context
    of the others anew.
    """
    return int(np.isnan(request.tpot or []).sum())


def _runs(versions: list[int], moved_at: int) -> list[tuple[int, int]]:
    """The ranges of equal versions on one engine."""
    edges = [i for i in range(1, len(versions)) if versions[i] != versions[i - 1] or i == moved_at]
    return list(zip([0, *edges], [*edges, len(versions)], strict=True))
