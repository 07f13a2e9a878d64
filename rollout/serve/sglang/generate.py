"""SGLang's POST /generate: generates from prompts, with log-probs at the sampling temperature.

`rollout.serve.app` registers `generate_routes`. The handler submits samples to the LLM through
Generation and writes the reply or a stream of events.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.token_runs import TokenRun
from rollout.sampling_params import SamplingParams
from rollout.serve.errors import ApiError, sglang_form
from rollout.serve.event_stream import EventStream
from rollout.serve.generation import Generation
from rollout.serve.generation_config import SamplingDefaults
from rollout.serve.responses import json_response
from rollout.serve.samples import (
    TokenData,
    finite,
    of_generated,
    of_prompt,
    of_run,
    streamed_text,
    text_of,
    weight_versions,
)
from rollout.serve.sampling import check_length, salt_of, sampling_params_of
from rollout.serve.schemas import SamplingFields
from rollout.serve.sglang.schemas import GenerateBody, SglangSampling
from rollout.serve.state import STATE, Route, ServerState

Request = DynamicInferenceRequest
Spell = Callable[[int], str | None]

_NOTHING = TokenData(token_ids=[], log_probs=[], top=[])


def generate_routes() -> list[Route]:
    return [
        Route(
            path="/generate",
            handler=_generate,
            body=GenerateBody,
            errors=sglang_form,
            generates=True,
            summary="Generate, as SGLang does",
        )
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A checked request and its generations. Lists after `generations` have an entry for each
    sample.

    is_list: whether the reply is a list.
    rids: the client's request names.
    only_scores: whether the client wants only prompt log-probs (max_new_tokens=0). The token that
        the engine generates is dropped.
    start_len: first prompt position whose log-prob is returned. -1 returns none.
    spell: returns a token's text, or None if the client wants no texts in log-prob rows.
    started_at: arrival of the request in seconds of perf_counter.
    """

    state: ServerState
    is_list: bool
    generations: list[Generation]
    prompts: list[list[int]]
    rids: list[str]
    params: list[SamplingParams]
    only_scores: list[bool]
    shows_special_tokens: list[bool]
    start_len: int
    num_top: int
    spell: Spell
    started_at: float


async def _generate(request: web.Request, body: GenerateBody) -> web.StreamResponse:
    job = await _job_of(request.app[STATE], body)
    if body.stream:
        return await _stream(request, job)
    tasks = [asyncio.ensure_future(generation.results()) for generation in job.generations]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # if one fails, the others are aborted
            task.cancel()
    samples = [sample for result in results for sample in result]
    replies = [_reply(job, index, sample) for index, sample in enumerate(samples)]
    return json_response(replies if job.is_list else replies[0])


# ---- the request


async def _job_of(state: ServerState, body: GenerateBody) -> _Job:
    """Return the job of a checked body. Raises ApiError and InvalidRequestError for a bad body."""
    if body.top_logprobs_num and not body.return_logprob:
        raise ApiError(
            400,
            f"top_logprobs_num={body.top_logprobs_num} needs return_logprob=true",
            param="top_logprobs_num",
        )
    prompts, is_batch = await _prompts_of(state, body)
    sampling = body.sampling_params or SglangSampling()
    each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    rids = body.rid if isinstance(body.rid, list) else [body.rid or uuid.uuid4().hex] * len(prompts)
    if not len(each) == len(rids) == len(prompts):
        raise ApiError(400, f"lists of sampling_params and rid must have {len(prompts)} entries")
    most = state.config.max_samples
    if (num_samples := sum(map(_n_of, each))) > most:
        raise ApiError(
            400, f"{num_samples} samples are more than max_samples={most}; send fewer prompts"
        )
    for prompt, own in zip(prompts, each, strict=True):
        _check_counts(own)
        check_length(state, len(prompt), own.max_new_tokens)
    params = [_params_of(state, body, own) for own in each]
    is_uniform = not isinstance(sampling, list) and not isinstance(body.rid, list)
    # A prompt with its own rid or parameters needs its own Generation, else one is enough.
    parts = [slice(None)] if is_uniform else [slice(i, i + 1) for i in range(len(prompts))]
    if body.stream and len(parts) > 1:
        raise ApiError(400, "a stream takes one rid and one set of sampling_params")
    return _Job(
        state=state,
        is_list=is_batch or _n_of(each[0]) > 1,
        generations=[
            Generation(
                state,
                prompts[part],
                params[part][0],
                n=_n_of(each[part][0]),
                name=rids[part][0],
                priority=body.priority or 0,
            )
            for part in parts
        ],
        prompts=_per_sample(prompts, each),
        rids=_per_sample(rids, each),
        params=_per_sample(params, each),
        only_scores=_per_sample([own.max_new_tokens == 0 for own in each], each),
        shows_special_tokens=_per_sample([p.skip_special_tokens is False for p in each], each),
        start_len=_start_len(body),
        num_top=body.top_logprobs_num or 0,
        spell=state.texts.of if body.return_text_in_logprobs else _no_text,
        started_at=time.perf_counter(),
    )


def _no_text(token_id: int) -> None:
    return None


def _n_of(sampling: SglangSampling) -> int:
    return 1 if sampling.n is None else sampling.n


def _per_sample(values: Sequence[Any], each: Sequence[SglangSampling]) -> list[Any]:
    pairs = zip(values, each, strict=True)
    return [value for value, sampling in pairs for _ in range(_n_of(sampling))]


def _check_counts(sampling: SglangSampling) -> None:
    most, least = sampling.max_new_tokens, sampling.min_new_tokens or 0
    if most is not None and most < 0:
        raise ApiError(400, f"max_new_tokens={most} must be at least 0", param="max_new_tokens")
    if least < 0 or (most is not None and least > most):
        raise ApiError(
            400,
            f"min_new_tokens={least} must be in [0, max_new_tokens={most}]",
            param="min_new_tokens",
        )


def _start_len(body: GenerateBody) -> int:
    if not body.return_logprob or body.logprob_start_len is None:
        return -1
    return max(-1, body.logprob_start_len)


async def _prompts_of(state: ServerState, body: GenerateBody) -> tuple[list[list[int]], bool]:
    """Return the ids of all prompts and whether the request is a batch. Raises ApiError."""
    if body.input_ids is not None and body.text is not None:
        raise ApiError(400, "give input_ids or text, not both", param="input_ids")
    ids: Any = body.input_ids
    kinds = {type(item) for item in ids or []}
    if len(kinds) > 1:
        raise ApiError(
            400, "input_ids must be a list of ids or a list of lists of ids", param="input_ids"
        )
    is_batch = kinds == {list}
    if ids is None and body.text is not None:
        is_batch = isinstance(body.text, list)
        texts = body.text if isinstance(body.text, list) else [body.text]
        prompts = await state.texts.encode(
            texts, add_special_tokens=True, max_tokens=state.max_model_len
        )
    else:
        prompts = list(ids or []) if is_batch else [ids or []]
    if not prompts or not all(prompts):
        raise ApiError(400, "the prompt is empty; give input_ids or text", param="input_ids")
    return prompts, is_batch


def _params_of(state: ServerState, body: GenerateBody, given: SglangSampling) -> SamplingParams:
    fields = SamplingFields(
        min_tokens=given.min_new_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        seed=given.sampling_seed,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=given.logit_bias,
        no_stop_trim=given.no_stop_trim,
        stream_interval=given.stream_interval,
    )
    num_top = body.top_logprobs_num or 0
    params = sampling_params_of(
        fields,
        state,
        max_tokens=1 if given.max_new_tokens == 0 else given.max_new_tokens,
        num_logprobs=num_top if body.return_logprob else None,
        num_prompt_logprobs=None if _start_len(body) < 0 else num_top,
        cache_salt=salt_of(body.cache_salt, body.extra_key),
        defaults=SamplingDefaults(),
    )
    return replace(params, logprobs_mode="temperature")


# ---- the reply


def _reply(job: _Job, index: int, request: Request) -> dict[str, Any]:
    only_scores = job.only_scores[index]
    data = _NOTHING if only_scores else of_generated(request)
    text = ""
    if not only_scores:
        text = text_of(job.state, request, with_special_tokens=job.shows_special_tokens[index])
    return {
        "text": text,
        "output_ids": list(data.token_ids),
        "meta_info": {
            **_meta_info(job, index, data),
            **_input_logprobs(job, index, request),
            "cached_tokens": request.num_cached_tokens or 0,
            "finish_reason": _finish_reason(request, len(data.token_ids)),
            "weight_version": _version_at_end(job.state, request),
            "weight_versions": weight_versions(job.state, request, len(data.token_ids)),
            "e2e_latency": time.perf_counter() - job.started_at,
        },
    }


def _meta_info(job: _Job, index: int, data: TokenData) -> dict[str, Any]:
    """Return the first part of a sample's meta_info, for the tokens in `data`. `_reply` adds the
    fields of a finished sample."""
    meta: dict[str, Any] = {
        "id": job.rids[index],
        "finish_reason": None,
        "prompt_tokens": len(job.prompts[index]),
        "completion_tokens": len(data.token_ids),
    }
    if job.params[index].return_log_probs:
        meta["output_token_logprobs"] = _rows(data, job.spell)
        if job.num_top:
            meta["output_top_logprobs"] = _top_rows(data, job.num_top, job.spell)
    return meta


def _input_logprobs(job: _Job, index: int, request: Request) -> dict[str, Any]:
    if not job.params[index].return_log_probs:
        return {}
    start = job.start_len
    if start < 0:
        return {"input_token_logprobs": []}
    data = of_prompt(request)
    lists: dict[str, Any] = {"input_token_logprobs": _rows(data, job.spell)[start:]}
    if job.num_top:
        lists["input_top_logprobs"] = _top_rows(data, job.num_top, job.spell)[start:]
    return lists


def _rows(data: TokenData, spell: Spell) -> list[list[Any]]:
    pairs = zip(data.log_probs or [], data.token_ids, strict=True)
    return [[None if lp is None else finite(lp), i, spell(i)] for lp, i in pairs]


def _top_rows(data: TokenData, num_top: int, spell: Spell) -> list[Any]:
    return [
        top and [[finite(lp), i, spell(i)] for i, lp in list(top.items())[:num_top]]
        for top in data.top or []
    ]


def _finish_reason(request: Request, num_tokens: int) -> dict[str, Any]:
    if request.finish_reason == "stop" and num_tokens:
        matched = request.stop_reason
        return {
            "type": "stop",
            "matched": request.generated_tokens[-1] if matched is None else matched,
        }
    if request.finish_reason in ("stop", "length"):
        return {"type": "length", "length": num_tokens}
    # Clients tell by the first words whether the reply has tokens.
    where = "in decoding" if num_tokens else "before prefill"
    return {"type": "abort", "message": f"Abort {where}", "status_code": None, "err_type": None}


def _version_at_end(state: ServerState, request: Request) -> str:
    version = request.completed_at_version
    return state.labels.of(state.llm.weights_version if version is None else version)


# ---- streams


async def _stream(request: web.Request, job: _Job) -> web.StreamResponse:
    """Send an event for each run of tokens. As in SGLang, each event repeats the sample's text, ids
    and log-probs so far."""
    (generation,) = job.generations
    stall_s = job.state.config.stalled_stream_timeout_s
    so_far = [TokenData(token_ids=[], log_probs=[], top=[]) for _ in job.prompts]
    texts = [
        streamed_text(job.state, job.params[i], job.prompts[i], with_special_tokens=special)
        for i, special in enumerate(job.shows_special_tokens)
    ]
    shown = [""] * len(so_far)
    async with EventStream(request, stall_s) as events, aclosing(generation.stream()) as items:
        try:
            async for index, item in items:
                if isinstance(item, TokenRun):
                    if job.only_scores[index]:
                        continue
                    new = of_run(item)
                    so_far[index] += new
                    if (text := texts[index]) is not None:
                        shown[index] += text.push(new.token_ids)
                    event: dict[str, Any] = {
                        "text": shown[index],
                        "output_ids": so_far[index].token_ids,
                        "meta_info": _meta_info(job, index, so_far[index]),
                    }
                else:
                    event = _reply(job, index, item)
                await events.send(event | ({"index": index} if job.is_list else {}))
        except Exception as fault:
            await events.send_error(fault, sglang_form)
        return await events.end()
