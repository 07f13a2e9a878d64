"""POST /v1/completions: text or tokens in, text and tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from aiohttp import web

from rollout.generated_text import StreamedText, TextOffsets
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.token_runs import TokenRun
from rollout.serve.errors import ApiError, json_response
from rollout.serve.openai.models import check_model
from rollout.serve.openai.reply import Job, check_stream, max_tokens_of, stream_reply, total_usage
from rollout.serve.openai.token_data import (
    TokenData,
    completion_logprobs,
    of_generated,
    of_prompt,
    of_run,
    spelling,
)
from rollout.serve.sampling import check_length, truncation_of
from rollout.serve.schemas import CompletionBody, PromptField
from rollout.serve.state import STATE, Route, ServerState
from rollout.text import complete_length

_DEFAULT_MAX_TOKENS = 16

Request = DynamicInferenceRequest


def completion_routes() -> list[Route]:
    return [
        Route(
            method="POST",
            path="/v1/completions",
            handler=_complete,
            body=CompletionBody,
            generates=True,
            summary="Complete prompts",
        )
    ]


async def _complete(request: web.Request, body: CompletionBody) -> web.StreamResponse:
    job = await _job_of(request.app[STATE], body)
    if body.stream:
        return await _stream(request, job)
    requests = await job.generation.results()
    reply = {
        **_head(job),
        "choices": [_choice(job, i, each) for i, each in enumerate(requests)],
        "usage": total_usage(job.prompts, requests, counts_generated=job.num_wanted > 0),
    }
    return json_response(reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job(Job[CompletionBody]):
    """Prompts to complete.

    echoed: the texts of the prompts, with `echo`. num_wanted: most tokens; 0 scores the prompt, and
    the one token after it is dropped.
    """

    echoed: list[str]
    num_wanted: int


async def _job_of(state: ServerState, body: CompletionBody) -> _Job:
    """Check a request. Raises ApiError and InvalidRequestError."""
    check_model(state, body.model)
    # The prompt's own log-probs are part of those of an echo.
    scores = [body.prompt_logprobs, body.logprobs if body.echo else None]
    num_scores = max((number for number in scores if number is not None), default=None)
    check_stream(body.stream, body.stream_options, num_scores)
    is_scored = body.echo or body.prompt_logprobs is not None
    given = max_tokens_of(body, least=0 if is_scored else 1, names_echo=True)
    max_tokens = _DEFAULT_MAX_TOKENS if given is None else given
    prompts, texts = await _prompts_of(state, body, max_tokens)
    for prompt in prompts:
        check_length(state, len(prompt), max_tokens)
    echoed = []
    if body.echo:
        pairs = zip(prompts, texts, strict=True)
        echoed = [_echo(state, *each, is_continued=max_tokens > 0) for each in pairs]
    return _Job.make(
        state,
        body,
        prompts,
        prefix="cmpl",
        max_tokens=max(1, max_tokens),
        num_logprobs=body.logprobs,
        num_prompt_logprobs=num_scores,
        echoed=echoed,
        num_wanted=max_tokens,
    )


async def _prompts_of(
    state: ServerState, body: CompletionBody, max_tokens: int
) -> tuple[list[list[int]], list[str | None]]:
    """Return the ids of all prompts, and the text of each text prompt that is not truncated."""
    given = _as_list(body.prompt if body.prompt_token_ids is None else [body.prompt_token_ids])
    texts: list[str | None] = [prompt if isinstance(prompt, str) else None for prompt in given]
    cut = truncation_of(state, body, max_tokens)
    prompts: list[list[int]] = given
    if given and None not in texts:
        prompts = await state.texts.encode(
            given,
            add_special_tokens=body.add_special_tokens is not False,
            max_tokens=state.max_model_len if cut is None else None,
        )
    if cut is not None:
        whole, prompts = prompts, [ids[cut] for ids in prompts]
        pairs = zip(whole, prompts, texts, strict=True)
        texts = [text if len(ids) == len(kept) else None for ids, kept, text in pairs]
    if not prompts or not all(prompts):
        raise ApiError(400, "the prompt is empty; give it at least one token", param="prompt")
    return prompts, texts


def _as_list(prompt: PromptField | None) -> list[Any]:
    """Return the prompts, each a text or a list of ids."""
    if prompt is None or isinstance(prompt, str):
        return [] if prompt is None else [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        raise ApiError(400, "prompts must be all texts or all lists of ids", param="prompt")
    return list(prompt)


def _echo(
    state: ServerState, prompt: Sequence[int], text: str | None, *, is_continued: bool
) -> str:
    """Return the text of a prompt. A character that its last token begins is the completion's."""
    if text is not None or state.llm.tokenizer is None:
        return text or ""
    decoded = state.texts.verbatim.decode(prompt)
    return decoded[: complete_length(decoded)] if is_continued else decoded


def _echo_offsets(state: ServerState, prompt: Sequence[int], echo: str) -> list[int]:
    """Return where the text of each token of an echoed prompt begins.

    Special tokens that the tokenizer added, and spaces that it strips, are no part of the echo.
    """
    if state.llm.tokenizer is None:
        return [0] * len(prompt)
    texts = list(map(state.texts.of, prompt))
    whole = "".join(texts)
    if whole.endswith(echo):
        num_left_out, ends = len(whole) - len(echo), accumulate(map(len, texts), initial=0)
        return [max(0, end - num_left_out) for end, _ in zip(ends, texts, strict=False)]
    verbatim = state.texts.verbatim
    num_left_out = max(0, verbatim.decode(prompt).find(echo))
    offsets = TextOffsets(verbatim).push(prompt)
    return [min(max(0, offset - num_left_out), len(echo)) for offset in offsets]


# ---- the reply


def _head(job: _Job) -> dict[str, Any]:
    return {**job.head, "object": "text_completion"}


def _choice(job: _Job, index: int, request: Request) -> dict[str, Any]:
    """Return a whole choice."""
    state, body = job.state, job.body
    text, data = "", TokenData(token_ids=[])
    if job.num_wanted:
        data = of_generated(request)
        text = job.text_of(request)
    elif body.logprobs is not None:
        data = TokenData(token_ids=[], log_probs=[], top=[])
    shown, echo, offsets = data, "", list[int]()
    if body.echo:
        echo = job.echoed[index // (job.body.n or 1)]
        shown = of_prompt(request) + data
    prompt = job.prompt_of(index)
    if body.logprobs is not None:
        if body.echo:
            offsets = _echo_offsets(state, prompt, echo)
        offsets += _offsets(job, index, start=len(echo)).push(data.token_ids)
    choice = _piece(job, index, echo + text, shown, offsets) | _ending(job, request)
    choice["token_ids"] = data.token_ids if body.return_token_ids else None
    choice["prompt_token_ids"] = prompt if body.return_token_ids else None
    choice["prompt_logprobs"] = job.prompt_scores(request)
    return choice


def _offsets(job: _Job, index: int, *, start: int = 0) -> TextOffsets:
    """Return what tells where the text of the tokens of a choice begins in its text."""
    tokenizer = job.state.llm.tokenizer
    if tokenizer is not None and job.shows_special_tokens:
        tokenizer = job.state.texts.verbatim
    return TextOffsets(tokenizer, job.prompt_of(index), start)


def _piece(
    job: _Job, index: int, text: str, data: TokenData, offsets: Sequence[int]
) -> dict[str, Any]:
    """Return a choice without its ending."""
    body, logprobs = job.body, None
    if body.logprobs is not None:
        spell = spelling(job.state.texts.of, bool(body.return_tokens_as_token_ids))
        logprobs = completion_logprobs(data, body.logprobs, spell, offsets)
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None,
        "stop_reason": None,
    }


def _ending(job: _Job, request: Request) -> dict[str, Any]:
    if job.num_wanted:
        return job.ending(request)
    return job.ending(request, 0) | {"finish_reason": "length", "stop_reason": None}


# ---- streams


@dataclass(slots=True)
class _Progress:
    """State of a streamed choice. offsets: None without log-probs. has_begun: a chunk was sent."""

    text: StreamedText | None
    offsets: TextOffsets | None
    has_begun: bool = False


async def _stream(request: web.Request, job: _Job) -> web.StreamResponse:
    progress: dict[int, _Progress] = {}

    def chunks_of(index: int, item: TokenRun | Request) -> list[dict[str, Any]]:
        if index not in progress:
            progress[index] = _new_progress(job, index)
        return [{"choices": [_chunk(job, index, item, progress[index])]}]

    return await stream_reply(
        request,
        job.generation,
        _head(job),
        chunks_of,
        options=job.body.stream_options,
        prompts=job.prompts,
        counts_generated=job.num_wanted > 0,
    )


def _new_progress(job: _Job, index: int) -> _Progress:
    offsets = None if job.body.logprobs is None else _offsets(job, index)
    return _Progress(text=job.streamed_text(index), offsets=offsets)


def _chunk(job: _Job, index: int, item: TokenRun | Request, progress: _Progress) -> dict[str, Any]:
    """Return the next chunk of a choice: new tokens, or its ending."""
    data, text, ending = TokenData(token_ids=[]), "", {}
    if isinstance(item, TokenRun):
        data = of_run(item) if job.num_wanted else data
        if progress.text is not None and job.num_wanted:
            text = progress.text.push(data.token_ids)
    else:
        ending = _ending(job, item)
        if progress.text is not None and job.num_wanted:
            text = progress.text.finish(job.text_of(item))
    is_first, progress.has_begun = not progress.has_begun, True
    if is_first and job.body.echo:
        text = job.echoed[index // (job.body.n or 1)] + text
    offsets = [] if progress.offsets is None else progress.offsets.push(data.token_ids)
    chunk = _piece(job, index, text, data, offsets) | ending
    if not data.token_ids:
        chunk["logprobs"] = None
    if job.body.return_token_ids:
        chunk["token_ids"] = data.token_ids
        if is_first:
            chunk["prompt_token_ids"] = job.prompt_of(index)
    return chunk
