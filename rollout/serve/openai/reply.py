"""Parts of replies that completions, chat and tokens in and out share."""

from __future__ import annotations

import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from aiohttp import web

from rollout.generated_text import StreamedText, shown_text
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.token_runs import TokenRun
from rollout.sampling_params import SamplingParams
from rollout.serve.errors import ApiError, ErrorForm, api_error_of, openai_form
from rollout.serve.event_stream import EventStream
from rollout.serve.generation import Generation
from rollout.serve.openai.token_data import of_prompt, prompt_logprobs
from rollout.serve.sampling import salt_of, sampling_params_of
from rollout.serve.schemas import ReplyFields, SamplingFields, StreamOptions
from rollout.serve.state import STATE, ServerState
from rollout.text import Tokenizer

Request = DynamicInferenceRequest
Body = TypeVar("Body", bound=ReplyFields)

_logger = logging.getLogger(__name__)


def new_id(prefix: str, given: str | None) -> str:
    """Return the id of a reply: the client's, or a new one."""
    return f"{prefix}-{given or uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


def total_usage(
    prompts: Sequence[Sequence[int]],
    requests: Sequence[Request],
    *,
    counts_generated: bool = True,
) -> dict[str, Any]:
    """Return the usage of a reply to these samples, in order. Each prompt counts once, and its
    tokens are cached if no sample of it had to compute them. counts_generated: False for tokens
    that are dropped.
    """
    num_prompt = sum(map(len, prompts))
    num_generated = sum(len(r.generated_tokens) for r in requests) if counts_generated else 0
    cached = [request.num_cached_tokens or 0 for request in requests]
    n = len(cached) // len(prompts)
    num_cached = sum(min(cached[start : start + n]) for start in range(0, len(cached), n))
    return {
        **_usage(num_prompt, num_generated),
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def _usage(num_prompt: int, num_generated: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


def weight_versions(
    state: ServerState, request: Request, num_tokens: int | None = None
) -> list[dict[str, Any]]:
    """Return which weights sampled which of the first `num_tokens` generated tokens (None: of all),
    as runs."""
    start, end = len(request.prompt_tokens), request.num_tokens
    spans = request.stamped_policy_spans()
    return state.labels.runs(spans.slice(start, end if num_tokens is None else start + num_tokens))


def provenance(request: Request, num_tokens: int | None = None) -> dict[str, Any]:
    """Return what this engine alone knows of the first `num_tokens` generated tokens (None: of
    all): how many versions the policy that sampled each, and its KV, were behind when the request
    ended, and the oldest version in the KV that it attended to. weights_version: that under which
    the request entered.
    """
    start = len(request.prompt_tokens)
    policy, kv = request.policy_staleness, request.kv_cache_staleness
    return {
        "weights_version": request.weights_version,
        "policy_staleness": None if policy is None else policy[start:][:num_tokens].tolist(),
        "kv_cache_staleness": None if kv is None else kv[start:][:num_tokens].tolist(),
        "context_kv_version_min": list(map(int, request.context_kv_version_min[:num_tokens])),
    }


def _requested_origins(
    state: ServerState, body: ReplyFields, request: Request, num_tokens: int | None = None
) -> dict[str, Any]:
    """Return what a client asked to know of the weights and the KV behind the first `num_tokens`
    generated tokens, None: behind all."""
    origins: dict[str, Any] = {}
    if body.return_weight_versions:
        origins["weight_versions"] = weight_versions(state, request, num_tokens)
    if body.return_provenance:
        origins |= provenance(request, num_tokens)
    return origins


def text_of(
    state: ServerState,
    request: Request,
    *,
    with_special_tokens: bool,
    tokenizer: Tokenizer | None = None,
) -> str:
    """Return the text of a finished request, "" without a tokenizer. tokenizer: what decodes it in
    place of the LLM's.
    """
    if not with_special_tokens and tokenizer is None:
        return request.generated_text or ""
    params = request.sampling_params
    assert params is not None, "engines take no request without"
    return shown_text(
        tokenizer or state.texts.verbatim,
        request.generated_tokens,
        request.prompt_tokens,
        finish_reason=request.finish_reason,
        stop_word_ids=request.stop_word_ids,
        sampling_params=params.serialize(),
    )


def streamed_text(
    state: ServerState,
    params: SamplingParams,
    prompt: Sequence[int],
    *,
    with_special_tokens: bool,
    tokenizer: Tokenizer | None = None,
) -> StreamedText | None:
    """Return what turns the tokens after `prompt` into text as they come; None without a
    tokenizer. tokenizer: as for `text_of`.
    """
    if state.llm.tokenizer is None:
        return None
    if tokenizer is None:
        tokenizer = state.texts.verbatim if with_special_tokens else state.llm.tokenizer
    return StreamedText(tokenizer, params, prompt)


def priority_of(given: int | None) -> int:
    """Return our priority: as in vLLM, clients give lower numbers to what goes first."""
    return -(given or 0)


def check_stream(
    stream: bool | None, options: StreamOptions | None, num_prompt_logprobs: int | None
) -> None:
    """Raise ApiError for options without a stream, and for log-probs of the prompt with one."""
    if not stream and options not in (None, StreamOptions()):
        raise ApiError(400, "stream_options need stream=true", param="stream_options")
    if stream and num_prompt_logprobs is not None:
        raise ApiError(400, "log-probs of the prompt cannot be streamed", param="stream")


def max_tokens_of(body: SamplingFields, *, least: int = 1, names_echo: bool = False) -> int | None:
    """Return max_tokens under either name, None if it is absent. Raises ApiError below `least`.

    names_echo: whether the error names `echo`, with which 0 is legal.
    """
    given = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if given is not None and given < least:
        or_echo = ", or 0 with echo" if names_echo and least else ""
        raise ApiError(
            400, f"max_tokens={given} must be at least {least}{or_echo}", param="max_tokens"
        )
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[Body]):
    """A checked request of /v1/completions or /v1/chat/completions.

    head: the fields with which each object of the reply begins. tokenizer: decodes the replies;
    None: the LLM's does.
    """

    state: ServerState
    body: Body
    prompts: list[list[int]]
    params: SamplingParams
    generation: Generation
    head: dict[str, Any]
    tokenizer: Tokenizer | None = None

    @classmethod
    def make(
        cls,
        state: ServerState,
        body: Body,
        prompts: list[list[int]],
        *,
        prefix: str,
        max_tokens: int | None,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
        **own: Any,
    ) -> Self:
        """Return the job of a body with checked prompts. prefix: start of the reply's id. own:
        further fields of the class. Raises ApiError and InvalidRequestError.
        """
        params = sampling_params_of(
            body,
            state,
            max_tokens=max_tokens,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            with_ranks=body.prompt_logprobs is not None,
            cache_salt=salt_of(body.cache_salt, body.extra_key),
        )
        request_id = body.request_id or body.rid
        reply_id = new_id(prefix, request_id)
        generation = Generation(
            state,
            prompts,
            params,
            n=1 if body.n is None else body.n,
            name=request_id or reply_id,
            priority=priority_of(body.priority),
        )
        head = {"id": reply_id, "created": now(), "model": body.model or state.served_name}
        return cls(
            state=state,
            body=body,
            prompts=prompts,
            params=params,
            generation=generation,
            head=head,
            **own,
        )

    @property
    def shows_special_tokens(self) -> bool:
        return self.body.skip_special_tokens is False

    def prompt_of(self, choice: int) -> list[int]:
        """Return the prompt of a choice."""
        return self.prompts[choice // (self.body.n or 1)]

    def text_of(self, request: Request) -> str:
        """Return the text of a finished request."""
        return text_of(
            self.state,
            request,
            with_special_tokens=self.shows_special_tokens,
            tokenizer=self.tokenizer,
        )

    def streamed_text(self, choice: int) -> StreamedText | None:
        """Return what turns the tokens of a choice into text as they come."""
        return streamed_text(
            self.state,
            self.params,
            self.prompt_of(choice),
            with_special_tokens=self.shows_special_tokens,
            tokenizer=self.tokenizer,
        )

    def prompt_scores(self, request: Request) -> list[Any] | None:
        """Return the log-probs of the request's prompt, None if they were not asked for."""
        num_top = self.body.prompt_logprobs
        if num_top is None:
            return None
        return prompt_logprobs(of_prompt(request), num_top, self.state.texts.of)

    def ending(self, request: Request, num_tokens: int | None = None) -> dict[str, Any]:
        """Return why a choice ended, and what its client asked to know of its first `num_tokens`
        tokens, None for all."""
        return {
            "finish_reason": request.finish_reason,
            "stop_reason": request.stop_reason,
            **_requested_origins(self.state, self.body, request, num_tokens),
        }


async def stream_reply(
    request: web.Request,
    generation: Generation,
    head: dict[str, Any],
    chunks_of: Callable[[int, TokenRun | Request], Iterable[dict[str, Any]]],
    *,
    options: StreamOptions | None,
    prompts: Sequence[Sequence[int]],
    counts_generated: bool = True,
) -> web.StreamResponse:
    """Answer by events: `head` with each chunk that `chunks_of` makes of (index of the sample, its
    new tokens or its whole request), then the usage, if `options` ask for it. With
    `continuous_usage_stats` each chunk has the usage of its sample so far.

    prompts, counts_generated: as for `total_usage`.
    """
    ended: dict[int, Request] = {}
    num_generated: defaultdict[int, int] = defaultdict(int)
    options = options or StreamOptions()
    stall_s = request.app[STATE].config.stalled_stream_timeout_s
    async with EventStream(request, stall_s) as events, aclosing(generation.stream()) as items:
        try:
            async for index, item in items:
                num_before = num_generated[index]
                if not isinstance(item, TokenRun):
                    ended[index] = item
                elif counts_generated:
                    num_generated[index] += len(item)
                chunks = [{**head, **chunk} for chunk in chunks_of(index, item)]
                if options.include_usage and options.continuous_usage_stats:
                    num_prompt = len(generation.prompt_of(index))
                    _add_usage(chunks, num_prompt, num_before, num_generated[index])
                await events.send(*chunks)
            if options.include_usage:
                samples = [ended[index] for index in sorted(ended)]
                usage = total_usage(prompts, samples, counts_generated=counts_generated)
                await events.send({**head, "choices": [], "usage": usage})
        except Exception as fault:
            await send_error(events, fault, openai_form)
        return await events.end()


def _add_usage(
    chunks: Sequence[dict[str, Any]], num_prompt: int, num_before: int, num_generated: int
) -> None:
    """Add the usage of a sample so far to its chunks. The last chunk has the new tokens."""
    for chunk in chunks:
        chunk["usage"] = _usage(num_prompt, num_generated if chunk is chunks[-1] else num_before)


async def send_error(events: EventStream, fault: Exception, form: ErrorForm) -> None:
    """Send an error as an event. Raises `fault` if the stream has not begun, or if the client has
    disconnected.
    """
    if not events.has_begun or isinstance(fault, ConnectionError):
        raise fault
    error = api_error_of(fault)
    if error is None:
        _logger.error("a stream failed", exc_info=fault)
        error = ApiError(500, f"the server failed: {type(fault).__name__}")
    await events.send(form(error))
