"""Runs a request of the openai protocol and sends its reply, whole or streamed.

Used by `rollout.serve.openai` (completions, chat, tokens_in_out). Each of these modules has a
subclass of Job, which `send_reply` runs.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from aiohttp import web
from typing_extensions import Self

from rollout.generated_text import StreamedText
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.token_runs import TokenRun
from rollout.sampling_params import SamplingParams
from rollout.serve.errors import ApiError, openai_form
from rollout.serve.event_stream import EventStream
from rollout.serve.generation import Generation
from rollout.serve.openai.logprobs import prompt_logprobs
from rollout.serve.responses import json_response
from rollout.serve.samples import of_prompt, streamed_text, text_of, weight_versions
from rollout.serve.sampling import salt_of, sampling_params_of
from rollout.serve.schemas import ReplyFields, SamplingFields, StreamOptions
from rollout.serve.state import ServerState
from rollout.text import Tokenizer

Request = DynamicInferenceRequest
Body = TypeVar("Body", bound=ReplyFields)
# Returns the chunks for a run of new tokens of one choice, or for its finished request at the end.
ChoiceStream = Callable[[TokenRun | Request], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(ABC):
    """A checked request and its generation.

    head: fields at the beginning of the reply, and of each of its chunks.
    counts_generated: whether generated tokens are returned and counted in the usage.
    """

    state: ServerState
    head: dict[str, Any]
    prompts: list[list[int]]
    generation: Generation
    is_streamed: bool
    stream_options: StreamOptions | None
    counts_generated: bool = True

    @abstractmethod
    def reply(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return the reply with all finished requests, without head and usage."""

    @abstractmethod
    def choice_stream(self, index: int) -> ChoiceStream:
        """Return a function that makes the chunks of choice `index`."""


async def send_reply(request: web.Request, job: Job) -> web.StreamResponse:
    """Generate the job's samples and send the whole reply or a stream of chunks."""
    if job.is_streamed:
        return await _stream(request, job)
    requests = await job.generation.results()
    usage = total_usage(job.prompts, requests, counts_generated=job.counts_generated)
    return json_response({**job.head, **job.reply(requests), "usage": usage})


async def _stream(request: web.Request, job: Job) -> web.StreamResponse:
    streams: dict[int, ChoiceStream] = {}
    ended: dict[int, Request] = {}
    num_generated: defaultdict[int, int] = defaultdict(int)
    options = job.stream_options or StreamOptions()
    stall_s = job.state.config.stalled_stream_timeout_s
    async with EventStream(request, stall_s) as events, aclosing(job.generation.stream()) as items:
        try:
            async for index, item in items:
                if index not in streams:
                    streams[index] = job.choice_stream(index)
                num_before = num_generated[index]
                if not isinstance(item, TokenRun):
                    ended[index] = item
                elif job.counts_generated:
                    num_generated[index] += len(item)
                chunks = [{**job.head, **chunk} for chunk in streams[index](item)]
                if options.include_usage and options.continuous_usage_stats:
                    num_prompt = len(job.generation.prompt_of(index))
                    _add_usage(chunks, num_prompt, num_before, num_generated[index])
                await events.send(*chunks)
            if options.include_usage:
                samples = [ended[index] for index in sorted(ended)]
                usage = total_usage(job.prompts, samples, counts_generated=job.counts_generated)
                await events.send({**job.head, "choices": [], "usage": usage})
        except Exception as fault:
            await events.send_error(fault, openai_form)
        return await events.end()


def _add_usage(
    chunks: Sequence[dict[str, Any]], num_prompt: int, num_before: int, num_generated: int
) -> None:
    """Add a choice's usage to its chunks. Only the last chunk counts the new tokens."""
    for chunk in chunks:
        chunk["usage"] = _usage(num_prompt, num_generated if chunk is chunks[-1] else num_before)


# ---- usage, provenance


def total_usage(
    prompts: Sequence[Sequence[int]],
    requests: Sequence[Request],
    *,
    counts_generated: bool = True,
) -> dict[str, Any]:
    """Return the usage of a reply. `requests` are the samples in the order of their prompts. Each
    prompt counts once. A prompt's tokens count as cached if no sample had to compute them."""
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


def provenance(request: Request, num_tokens: int | None = None) -> dict[str, Any]:
    """Return `weights_version` (the version when the request entered) and lists with one value per
    token. The lists cover the first `num_tokens` generated tokens, or all if it is None.

    policy_staleness: versions by which a token's weights were behind when the request ended.
    kv_cache_staleness: versions by which a token's KV was behind when the request ended.
    context_kv_version_min: oldest version in the KV to which a token attended.
    """
    start = len(request.prompt_tokens)
    policy, kv = request.policy_staleness, request.kv_cache_staleness
    return {
        "weights_version": request.weights_version,
        "policy_staleness": None if policy is None else policy[start:][:num_tokens].tolist(),
        "kv_cache_staleness": None if kv is None else kv[start:][:num_tokens].tolist(),
        "context_kv_version_min": list(map(int, request.context_kv_version_min[:num_tokens])),
    }


# ---- fields of requests


def new_id(prefix: str, given: str | None) -> str:
    """Return `prefix` and the client's id, or `prefix` and a new id."""
    return f"{prefix}-{given or uuid.uuid4().hex}"


def priority_of(given: int | None) -> int:
    """Return the engine's priority of a request. A client's lower number goes first, as in vLLM."""
    return -(given or 0)


def check_stream(
    stream: bool | None, options: StreamOptions | None, num_prompt_logprobs: int | None
) -> None:
    """Raise ApiError for stream options without a stream and for prompt log-probs with a stream."""
    if not stream and options not in (None, StreamOptions()):
        raise ApiError(400, "stream_options need stream=true", param="stream_options")
    if stream and num_prompt_logprobs is not None:
        raise ApiError(
            400, "log-probs of the prompt cannot be streamed; set stream=false", param="stream"
        )


def max_tokens_of(body: SamplingFields, *, least: int = 1, names_echo: bool = False) -> int | None:
    """Return max_tokens or max_completion_tokens, or None if both are absent. Raises ApiError if
    the number is below `least`. With `names_echo`, the error says that 0 is legal with `echo`."""
    given = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if given is not None and given < least:
        or_echo = ", or 0 with echo" if names_echo and least else ""
        raise ApiError(
            400, f"max_tokens={given} must be at least {least}{or_echo}", param="max_tokens"
        )
    return given


# ---- completions and chats


@dataclass(frozen=True, slots=True, kw_only=True)
class TextJob(Job, Generic[Body]):
    """A checked request of /v1/completions or /v1/chat/completions.

    tokenizer: decodes the replies. None takes the LLM's tokenizer.
    """

    body: Body
    params: SamplingParams
    tokenizer: Tokenizer | None = None

    @classmethod
    def make(
        cls,
        state: ServerState,
        body: Body,
        prompts: list[list[int]],
        *,
        prefix: str,
        kind: str,
        max_tokens: int | None,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
        **own: Any,
    ) -> Self:
        """Return the job of a body with checked prompts. Raises ApiError and InvalidRequestError.

        prefix: start of the reply's id.
        kind: the reply's `object`.
        own: further fields of the class.
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
        head = {
            "id": reply_id,
            "created": int(time.time()),
            "model": body.model or state.served_name,
            "object": kind,
        }
        return cls(
            state=state,
            head=head,
            prompts=prompts,
            generation=Generation(
                state,
                prompts,
                params,
                n=1 if body.n is None else body.n,
                name=request_id or reply_id,
                priority=priority_of(body.priority),
            ),
            is_streamed=bool(body.stream),
            stream_options=body.stream_options,
            body=body,
            params=params,
            **own,
        )

    @property
    def shows_special_tokens(self) -> bool:
        return self.body.skip_special_tokens is False

    def prompt_of(self, choice: int) -> list[int]:
        return self.prompts[choice // (self.body.n or 1)]

    def text_of(self, request: Request) -> str:
        return text_of(
            self.state,
            request,
            with_special_tokens=self.shows_special_tokens,
            tokenizer=self.tokenizer,
        )

    def streamed_text(self, choice: int) -> StreamedText | None:
        """Return a StreamedText for a choice's tokens, or None if the LLM has no tokenizer."""
        return streamed_text(
            self.state,
            self.params,
            self.prompt_of(choice),
            with_special_tokens=self.shows_special_tokens,
            tokenizer=self.tokenizer,
        )

    def prompt_logprobs_of(self, request: Request) -> list[Any] | None:
        """Return `prompt_logprobs` of a request, or None if the client did not ask for them."""
        num_top = self.body.prompt_logprobs
        if num_top is None:
            return None
        return prompt_logprobs(of_prompt(request), num_top, self.state.texts.of)

    def ending(self, request: Request, num_tokens: int | None = None) -> dict[str, Any]:
        """Return the reason why a choice ended, with weights versions and provenance if the client
        asked for them. Versions and provenance cover the first `num_tokens` tokens, or all if it is
        None."""
        ending: dict[str, Any] = {
            "finish_reason": request.finish_reason,
            "stop_reason": request.stop_reason,
        }
        if self.body.return_weight_versions:
            ending["weight_versions"] = weight_versions(self.state, request, num_tokens)
        if self.body.return_provenance:
            ending |= provenance(request, num_tokens)
        return ending
