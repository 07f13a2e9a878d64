"""AsyncGeneration: the generating methods that AsyncLLM and ThreadedLLM share; and how records and
errors become the requests that users get. Used by the LLMs and runtimes of this folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Protocol

import torch

from rollout.apis.arguments import SamplingArgument, as_groups
from rollout.coordinator.client.streams import RequestFuture, RequestStream
from rollout.errors import (
    ClientStateError,
    CoordinatorLostError,
    InvalidRequestError,
    RequestAbortedError,
    RolloutError,
)
from rollout.generated_text import StreamedText, add_text
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import Status
from rollout.requests.token_runs import TokenRun
from rollout.sampling_params import SamplingParams
from rollout.serve.llm import Group
from rollout.text import Prompt, Tokenizer, encode_prompt

# Errors that fail all pending requests at once.
LOST = (CoordinatorLostError, ClientStateError)


def finished_request(
    record: DynamicInferenceRequestRecord, tokenizer: Tokenizer | None
) -> DynamicInferenceRequest:
    """Return the record merged into one request; with a tokenizer, `generated_text` is set."""
    add_text(record, tokenizer)
    request = record.merge()
    params = request.sampling_params
    assert params is not None, "engines take no request without"
    if not params.return_prompt_tokens:
        _drop_prompt(request)
    return request


def failed_request(
    request_id: int,
    prompt: Prompt,
    params: SamplingParams,
    error: Exception,
    tokenizer: Tokenizer | None,
) -> DynamicInferenceRequest:
    """Return a FAILED request with the error, in place of one without a record.

    A request that is aborted before an engine has it has no record.
    """
    request = DynamicInferenceRequest(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_tokens=torch.tensor(_ids_of(prompt, tokenizer), dtype=torch.int64),
        sampling_params=params,
        status=Status.FAILED,
    )
    request.finish_reason = "abort" if isinstance(error, RequestAbortedError) else "error"
    request.add_event_error_nontransient(error)
    request.add_event_fail()
    return request


def _ids_of(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Return the prompt's ids; [] for a text that the tokenizer cannot encode."""
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]  # of arrays of any kind
    with suppress(Exception):  # the tokenizer is the user's: it may raise anything
        if tokenizer is not None:
            return encode_prompt(tokenizer, prompt)
    return []


def _drop_prompt(request: DynamicInferenceRequest) -> None:
    """Keep only the generated positions; staleness tensors then cover those alone."""
    start, end = len(request.prompt_tokens), request.num_tokens
    request.precomputed_block_hashes = request.precomputed_block_hashes  # read while it is here
    request.prompt_tokens = torch.empty(0, dtype=torch.int64)
    request.policy_spans = request.policy_spans.slice(start, end)
    request.kv_spans = request.kv_spans.slice(start, end)


# ---- generation


class AsyncGeneration(Protocol):
    """Generation for asyncio, over methods that queue requests.

    A class has `add_groups`, `stream_groups` and `abort_request` of its own, as ServedLLM describes
    them, and `_unfinished`. The other methods that begin with an underscore may be overridden.
    """

    tokenizer: Tokenizer | None

    def add_groups(
        self, groups: Sequence[Group], *, priority: int = 0, deadline_s: float | None = None
    ) -> list[list[RequestFuture]]: ...

    def stream_groups(
        self, groups: Sequence[Group], *, priority: int = 0, deadline_s: float | None = None
    ) -> list[list[RequestStream]]: ...

    def abort_request(self, future: RequestFuture) -> None: ...

    def _unfinished(self) -> Iterable[RequestFuture]:
        """Return the futures of this object's unfinished requests."""
        ...

    async def _connect(self) -> None:
        """Connect to the engines. Each method begins with it. No-op in the engine's process."""
        return None

    def _cut_short(self) -> RolloutError | None:
        """Return the error that ends all pending calls; None while they can be answered."""
        return None

    def _fails_batch(self, error: BaseException) -> bool:
        """Return whether `generate` raises an error of one request, instead of returning that
        request FAILED."""
        return True

    @asynccontextmanager
    async def _named_errors(self) -> AsyncIterator[None]:
        """Raise the error of `_cut_short` in place of errors that follow from it."""
        yield

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingArgument = None,
        n: int = 1,
        *,
        priority: int = 0,
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Run prompts to their end. One prompt with n = 1 gives one request, else a flat list.

        The list is prompt-major, in input order. A higher `priority` goes first. Cancelling aborts
        the requests. Raises InvalidRequestError for a malformed prompt, before anything of the
        batch is queued, EngineStateError after the end, and the error that ended the engines. What
        only an engine of a fleet can refuse, such as an id beyond the vocabulary, fails its own
        request, which comes back FAILED with its error event.
        """
        await self._connect()
        groups, is_single = as_groups(prompts, sampling_params, n)
        samples = [(prompt, params) for prompt, each in groups for params in each]
        futures = [f for group in self.add_groups(groups, priority=priority) for f in group]
        async with self._named_errors():
            try:
                if futures:
                    await asyncio.wait(futures)
            finally:
                for future in futures:
                    future.cancel()  # no-op for those that are done
            for future in futures:
                error = future.exception()
                if error is not None and self._fails_batch(error):
                    raise error
        requests = [self.request_of(f, *each) for f, each in zip(futures, samples, strict=True)]
        return requests[0] if is_single and n == 1 else requests

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        as_text: bool = False,
    ) -> AsyncIterator[list[int] | str | DynamicInferenceRequest]:
        """Yield token ids as they come, each once, then the whole request. Closed early, it aborts.

        as_text: yield pieces of text instead. Text that may begin a stop string is held back.
        """
        await self._connect()
        params = sampling_params or SamplingParams()
        if as_text and self.tokenizer is None:
            raise InvalidRequestError("as_text=True needs a tokenizer, and there is none")
        ((stream,),) = self.stream_groups([(prompt, [params])], priority=priority)
        items = self._items_of(stream, prompt, params, as_text)
        async with aclosing(items), self._named_errors():
            async for item in items:
                yield item

    async def _items_of(
        self, stream: RequestStream, prompt: Prompt, params: SamplingParams, as_text: bool
    ) -> AsyncGenerator[list[int] | str | DynamicInferenceRequest, None]:
        text = None
        if as_text and self.tokenizer is not None:
            text = StreamedText(self.tokenizer, params, stream.prompt_tokens)
        async with aclosing(stream):
            try:
                async for item in stream:
                    if isinstance(item, TokenRun):
                        ids = item.token_ids.tolist()
                        if piece := ids if text is None else text.push(ids):
                            yield piece
                        continue
                    request = finished_request(item, self.tokenizer)
                    if text is not None and (rest := text.finish(request.generated_text)):
                        yield rest
                    yield request
            except RequestAbortedError as error:  # before an engine had the request
                if self._cut_short() is not None:
                    raise
                yield failed_request(stream.request_id, prompt, params, error, self.tokenizer)

    async def abort(self, request_ids: Iterable[int] | None = None) -> int:
        """End unfinished requests of this object now, in any state; None ends all of them.

        Returns how many there were. Their callers get them with the tokens so far, FAILED with the
        finish reason "abort". Ids of other requests are ignored.
        """
        await self._connect()
        wanted = None if request_ids is None else set(request_ids)
        futures = [f for f in self._unfinished() if wanted is None or f.request_id in wanted]
        for future in futures:
            self.abort_request(future)
        if futures:
            await asyncio.wait(futures)
        return len(futures)

    def request_of(
        self, future: RequestFuture, prompt: Prompt, params: SamplingParams
    ) -> DynamicInferenceRequest:
        """Return the request of a future that is done. Without a record it is FAILED."""
        error: Any = future.exception()
        if error is None:
            return finished_request(future.result(), self.tokenizer)
        if isinstance(error, LOST):
            error = self._cut_short() or error
        return failed_request(future.request_id, prompt, params, error, self.tokenizer)
