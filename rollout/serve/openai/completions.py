"""POST /v1/completions: completes prompts of text or token ids, or only scores them.

`rollout.serve.app` registers `completion_routes`. `_job_of` checks a request. `send_reply` of
`rollout.serve.openai.reply` generates the choices and sends the reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from aiohttp import web

from rollout.generated_text import TextOffsets
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.token_runs import TokenRun
from rollout.serve.errors import ApiError
from rollout.serve.openai.logprobs import completion_logprobs, spelling
from rollout.serve.openai.reply import (
    ChoiceStream,
    TextJob,
    check_stream,
    max_tokens_of,
    send_reply,
)
from rollout.serve.samples import TokenData, of_generated, of_prompt, of_run
from rollout.serve.sampling import check_length, truncation_of
from rollout.serve.schemas import CompletionBody, PromptField
from rollout.serve.state import STATE, Route, ServerState
from rollout.text import complete_length

_DEFAULT_MAX_TOKENS = 16

Request = DynamicInferenceRequest


def completion_routes() -> list[Route]:
    return [
        Route(
            path="/v1/completions",
            handler=_complete,
            body=CompletionBody,
            generates=True,
            summary="Complete prompts",
        )
    ]


async def _complete(request: web.Request, body: CompletionBody) -> web.StreamResponse:
    return await send_reply(request, await _job_of(request.app[STATE], body))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job(TextJob[CompletionBody]):
    """A checked request. With max_tokens=0 the prompts are only scored.

    echoed: the text of each prompt, or empty if the body does not set `echo`.
    """

    echoed: list[str]

    def reply(self, requests: Sequence[Request]) -> dict[str, Any]:
        return {"choices": [_choice(self, i, each) for i, each in enumerate(requests)]}

    def choice_stream(self, index: int) -> ChoiceStream:
        return _ChoiceStream(self, index).chunks

    def echo_of(self, choice: int) -> str:
        return self.echoed[choice // (self.body.n or 1)]


async def _job_of(state: ServerState, body: CompletionBody) -> _Job:
    """Return the job of a checked body. Raises ApiError and InvalidRequestError for a bad body."""
    state.require_model(body.model)
    # With echo, `logprobs` also asks for the log-probs of the prompt.
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
        kind="text_completion",
        max_tokens=max(1, max_tokens),  # engines generate at least one token
        num_logprobs=body.logprobs,
        num_prompt_logprobs=num_scores,
        counts_generated=max_tokens > 0,
        echoed=echoed,
    )


async def _prompts_of(
    state: ServerState, body: CompletionBody, max_tokens: int
) -> tuple[list[list[int]], list[str | None]]:
    """Return the token ids and the text of each prompt. The text is None if the prompt was given as
    ids or truncated. Raises ApiError for an empty prompt."""
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
    """Return the prompts, each a text or a list of ids. Raises ApiError for a mixture of both."""
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
    """Return the text of a prompt, decoded from its ids if `text` is None. Without a tokenizer the
    decoded text is "". If a completion follows (`is_continued`), it begins with an incomplete last
    character, which is omitted here."""
    if text is not None or state.llm.tokenizer is None:
        return text or ""
    decoded = state.texts.verbatim.decode(prompt)
    return decoded[: complete_length(decoded)] if is_continued else decoded


def _echo_offsets(state: ServerState, prompt: Sequence[int], echo: str) -> list[int]:
    """Return the offset of each prompt token's text in the echo, in characters. The echo can lack
    special tokens that the tokenizer added and spaces that it strips."""
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


def _choice(job: _Job, index: int, request: Request) -> dict[str, Any]:
    state, body = job.state, job.body
    text, data = "", TokenData(token_ids=[])
    if job.counts_generated:
        data = of_generated(request)
        text = job.text_of(request)
    elif body.logprobs is not None:
        data = TokenData(token_ids=[], log_probs=[], top=[])
    shown, echo, offsets = data, "", list[int]()
    if body.echo:
        echo = job.echo_of(index)
        shown = of_prompt(request) + data
    prompt = job.prompt_of(index)
    if body.logprobs is not None:
        if body.echo:
            offsets = _echo_offsets(state, prompt, echo)
        offsets += _offsets(job, index, start=len(echo)).push(data.token_ids)
    choice = _piece(job, index, echo + text, shown, offsets) | _ending(job, request)
    choice["token_ids"] = data.token_ids if body.return_token_ids else None
    choice["prompt_token_ids"] = prompt if body.return_token_ids else None
    choice["prompt_logprobs"] = job.prompt_logprobs_of(request)
    return choice


def _offsets(job: _Job, index: int, *, start: int = 0) -> TextOffsets:
    """Return a TextOffsets for the generated tokens of a choice. `start` is the first token's
    offset in characters."""
    tokenizer = job.state.llm.tokenizer
    if tokenizer is not None and job.shows_special_tokens:
        tokenizer = job.state.texts.verbatim
    return TextOffsets(tokenizer, job.prompt_of(index), start)


def _piece(
    job: _Job, index: int, text: str, data: TokenData, offsets: Sequence[int]
) -> dict[str, Any]:
    """Return a choice, or one chunk of it, without the reason why it ended."""
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
    if job.counts_generated:
        return job.ending(request)
    return job.ending(request, 0) | {"finish_reason": "length", "stop_reason": None}


# ---- streams


class _ChoiceStream:
    """Makes the chunks of one streamed choice: decodes its tokens and counts their text offsets."""

    def __init__(self, job: _Job, index: int) -> None:
        self._job, self._index = job, index
        self._text = job.streamed_text(index) if job.counts_generated else None
        self._offsets = None if job.body.logprobs is None else _offsets(job, index)
        self._has_begun = False

    def chunks(self, item: TokenRun | Request) -> list[dict[str, Any]]:
        """Return one chunk for new tokens, or the last chunk if `item` is the finished request."""
        job, data, text, ending = self._job, TokenData(token_ids=[]), "", {}
        if isinstance(item, TokenRun):
            if job.counts_generated:
                data = of_run(item)
            if self._text is not None:
                text = self._text.push(data.token_ids)
        else:
            ending = _ending(job, item)
            if self._text is not None:
                text = self._text.finish(job.text_of(item))
        is_first, self._has_begun = not self._has_begun, True
        if is_first and job.body.echo:
            text = job.echo_of(self._index) + text
        offsets = [] if self._offsets is None else self._offsets.push(data.token_ids)
        chunk = _piece(job, self._index, text, data, offsets) | ending
        if not data.token_ids:
            chunk["logprobs"] = None
        if job.body.return_token_ids:
            chunk["token_ids"] = data.token_ids
            if is_first:
                chunk["prompt_token_ids"] = job.prompt_of(self._index)
        return [{"choices": [chunk]}]
