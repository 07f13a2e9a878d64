"""POST /inference/v1/generate: tokens in, tokens out."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.token_runs import TokenRun
from rollout.serve.errors import ApiError, json_response
from rollout.serve.fields import Fields
from rollout.serve.generation import Generation
from rollout.serve.openai.models import check_model
from rollout.serve.openai.reply import (
    check_stream,
    max_tokens_of,
    new_id,
    now,
    priority_of,
    provenance,
    stream_reply,
    total_usage,
    weight_versions,
)
from rollout.serve.openai.token_data import (
    TokenData,
    of_generated,
    of_prompt,
    of_run,
    prompt_logprobs,
    token_logprobs,
)
from rollout.serve.sampling import check_length, default_max_tokens, sampling_params_of
from rollout.serve.schemas import GenerateBody
from rollout.serve.state import STATE, Route, ServerState

Request = DynamicInferenceRequest


def generate_routes() -> list[Route]:
    return [
        Route(
            method="POST",
            path="/inference/v1/generate",
            handler=_generate,
            body=GenerateBody,
            generates=True,
            summary="Continue token ids by token ids",
        ),
        Route(
            method="POST",
            path="/inference/v1/abort_requests",
            handler=_abort,
            body=AbortBody,
            summary="Answer requests with the tokens that they have",
        ),
    ]


class AbortBody(Fields, kw_only=True):
    """request_ids: as requests name themselves; unknown ones are ignored."""

    request_ids: list[str]


async def _abort(request: web.Request, body: AbortBody) -> web.Response:
    request.app[STATE].live.abort(body.request_ids)
    return web.Response()


async def _generate(request: web.Request, body: GenerateBody) -> web.StreamResponse:
    state = request.app[STATE]
    reply_id = body.request_id or new_id("generate", None)
    head = {
        "request_id": reply_id,
        "model": body.model or state.served_name,
        "created": now(),
    }
    generation = _generation_of(state, body, reply_id)
    if body.stream:
        return await stream_reply(
            request,
            generation,
            head,
            lambda index, item: [_chunk(state, body, index, item)],
            options=body.stream_options,
            prompts=[body.token_ids],
        )
    requests = await generation.results()
    wanted = body.sampling_params.prompt_logprobs
    scores = None
    if wanted is not None:
        scores = prompt_logprobs(of_prompt(requests[0]), wanted, state.texts.of)
    choices = [
        _choice(body, index, of_generated(each)) | _ending(state, body, each)
        for index, each in enumerate(requests)
    ]
    reply = {
        **head,
        "choices": choices,
        "usage": total_usage([body.token_ids], requests),
        "prompt_logprobs": scores,
        "prompt_token_ids": body.token_ids if body.return_token_ids else None,
    }
    return json_response(reply)


def _generation_of(state: ServerState, body: GenerateBody, name: str) -> Generation:
    """Check a request. Raises ApiError and InvalidRequestError."""
    check_model(state, body.model)
    fields = body.sampling_params
    check_stream(body.stream, body.stream_options, fields.prompt_logprobs)
    if not body.token_ids:
        raise ApiError(400, "token_ids is empty; give at least one", param="token_ids")
    max_tokens = max_tokens_of(fields)
    if max_tokens is None:
        max_tokens = default_max_tokens(state, len(body.token_ids))
    check_length(state, len(body.token_ids), max_tokens)
    params = sampling_params_of(
        fields,
        state,
        max_tokens=max_tokens,
        num_logprobs=fields.logprobs,
        num_prompt_logprobs=fields.prompt_logprobs,
        with_ranks=fields.logprobs is not None or fields.prompt_logprobs is not None,
        cache_salt=body.cache_salt,
    )
    return Generation(
        state,
        [body.token_ids],
        params,
        n=1 if fields.n is None else fields.n,
        name=name,
        priority=priority_of(body.priority),
    )


def _choice(body: GenerateBody, index: int, data: TokenData) -> dict[str, Any]:
    """Return a choice without its ending."""
    num_top = body.sampling_params.logprobs
    return {
        "index": index,
        "token_ids": data.token_ids,
        "logprobs": None if num_top is None else token_logprobs(data, num_top),
        "finish_reason": None,
        "stop_reason": None,
    }


def _ending(state: ServerState, body: GenerateBody, request: Request) -> dict[str, Any]:
    return {
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
        "weight_versions": weight_versions(state, request),
        **(provenance(request) if body.return_provenance else {}),
    }


def _chunk(
    state: ServerState, body: GenerateBody, index: int, item: TokenRun | Request
) -> dict[str, Any]:
    """Return the next chunk of a choice: new tokens, or its ending."""
    if isinstance(item, TokenRun):
        return {"choices": [_choice(body, index, of_run(item))]}
    last = _choice(body, index, TokenData(token_ids=[])) | _ending(state, body, item)
    return {"choices": [last | {"logprobs": None}]}
