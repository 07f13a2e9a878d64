"""`check_provenance`: checks each token against the weights that drew it and those that wrote
its KV, by the versions in the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout import DynamicInferenceRequest
from tests.engine.dense_model import DenseModel, Position
from tests.tiny_models import Margins, possible_tokens, sampled_token, tokens_of


def check_provenance(
    models: Mapping[int, DenseModel], request: DynamicInferenceRequest, margins: Margins
) -> None:
    """Each token must be one that the weights of its version draw over the context that it saw.

    models: by version. Where KV was recomputed since a token was drawn, that token had seen a
    context all of its own version: the requests of one such engine pause only to be recomputed.
    """
    tokens, num_prompt = tokens_of(request), len(request.prompt_tokens)
    written_by = request.kv_spans.to_array().tolist()
    drawn_by = request.policy_versions.tolist()
    context: list[Position] = []
    for index in range(len(tokens) - 1):
        writer = models[written_by[index]]
        new, logits_TV = writer.extend(context, [tokens[index]], written_by[index])
        context += new
        drawn = index + 1 - num_prompt
        if drawn < 0:
            continue
        if drawn_by[drawn] != written_by[index]:
            reader = models[drawn_by[drawn]]
            _, logits_TV = reader.extend([], tokens[: index + 1], drawn_by[drawn])
        _check_token(request, drawn, logits_TV[-1], margins)


def _check_token(
    request: DynamicInferenceRequest, index: int, logits_V: Any, margins: Margins
) -> None:
    margins.num_tokens += 1
    params, seed = request.sampling_params, request.seed or 0
    token, position = request.generated_tokens[index], len(request.prompt_tokens) + index
    if token == sampled_token(logits_V, params, seed, position):
        return
    where = f"request {request.request_id}, token {index}: {token}"
    outcomes = possible_tokens(logits_V, params, seed, position)
    assert token in outcomes, f"{where}, possible were {outcomes}"
    margins.exceptions.append(where)
