"""POST /inference/v1/generate: generates from token ids and returns token ids.

`rollout.serve.app` registers `generate_routes`. `_job_of` checks a request. `send_reply` of
`rollout.serve.openai.reply` generates the choices. POST /inference/v1/abort_requests aborts
requests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.token_runs import TokenRun
from rollout.serve.errors import ApiError
from rollout.serve.fields import Fields
from rollout.serve.generation import Generation
from rollout.serve.openai.logprobs import prompt_logprobs, token_logprobs
from rollout.serve.openai.reply import (
    ChoiceStream,
    Job,
    check_stream,
    max_tokens_of,
    new_id,
    priority_of,
    provenance,
    send_reply,
)
from rollout.serve.samples import TokenData, of_generated, of_prompt, of_run, weight_versions
from rollout.serve.sampling import check_length, default_max_tokens, sampling_params_of
from rollout.serve.schemas import GenerateBody
from rollout.serve.state import STATE, Route, ServerState

Request = DynamicInferenceRequest


class AbortBody(Fields, kw_only=True):
    """Body of POST /inference/v1/abort_requests. Unknown `request_ids` are ignored."""

    request_ids: list[str]


def generate_routes() -> list[Route]:
    return [
        Route(
            path="/inference/v1/generate",
            handler=_generate,
            body=GenerateBody,
            generates=True,
            summary="Continue token ids by token ids",
        ),
        Route(
            path="/inference/v1/abort_requests",
            handler=_abort,
            body=AbortBody,
            summary="Answer requests with their tokens so far",
        ),
    ]


async def _abort(request: web.Request, body: AbortBody) -> web.Response:
    request.app[STATE].live.abort(body.request_ids)
    return web.Response()


async def _generate(request: web.Request, body: GenerateBody) -> web.StreamResponse:
    return await send_reply(request, _job_of(request.app[STATE], body))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job(Job):
    body: GenerateBody

    def reply(self, requests: Sequence[Request]) -> dict[str, Any]:
        body, num_top = self.body, self.body.sampling_params.prompt_logprobs
        scores = None
        if num_top is not None:
            scores = prompt_logprobs(of_prompt(requests[0]), num_top, self.state.texts.of)
        return {
            "choices": [
                self._choice(index, of_generated(each)) | self._ending(each)
                for index, each in enumerate(requests)
            ],
            "prompt_logprobs": scores,
            "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        }

    def choice_stream(self, index: int) -> ChoiceStream:
        def chunks(item: TokenRun | Request) -> list[dict[str, Any]]:
            if isinstance(item, TokenRun):
                return [{"choices": [self._choice(index, of_run(item))]}]
            last = self._choice(index, TokenData(token_ids=[])) | self._ending(item)
            return [{"choices": [last | {"logprobs": None}]}]

        return chunks

    def _choice(self, index: int, data: TokenData) -> dict[str, Any]:
        """Return a choice, or one chunk of it, without the reason why it ended."""
        num_top = self.body.sampling_params.logprobs
        return {
            "index": index,
            "token_ids": data.token_ids,
            "logprobs": None if num_top is None else token_logprobs(data, num_top),
            "finish_reason": None,
            "stop_reason": None,
        }

    def _ending(self, request: Request) -> dict[str, Any]:
        return {
            "finish_reason": request.finish_reason,
            "stop_reason": request.stop_reason,
            "weight_versions": weight_versions(self.state, request),
            **(provenance(request) if self.body.return_provenance else {}),
        }


def _job_of(state: ServerState, body: GenerateBody) -> _Job:
    """Return the job of a checked body. Raises ApiError and InvalidRequestError for a bad body."""
    state.require_model(body.model)
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
    reply_id = body.request_id or new_id("generate", None)
    generation = Generation(
        state,
        [body.token_ids],
        params,
        n=1 if fields.n is None else fields.n,
        name=reply_id,
        priority=priority_of(body.priority),
    )
    head = {
        "request_id": reply_id,
        "model": body.model or state.served_name,
        "created": int(time.time()),
    }
    return _Job(
        state=state,
        head=head,
        prompts=[body.token_ids],
        generation=generation,
        is_streamed=bool(body.stream),
        stream_options=body.stream_options,
        body=body,
    )
