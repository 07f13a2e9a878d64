"""AsyncGeneration: the generating methods that AsyncLLM and ThreadedLLM share.

`finished_request` and `failed_request` create the requests that users get. Used by
`rollout.apis.async_llm`, `rollout.apis.threaded_llm` and `rollout.apis.in_process`. No state is
kept here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
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

# Errors of an ended connection, which fail all pending requests at once.
LOST = (CoordinatorLostError, ClientStateError)


def finished_request(
    record: DynamicInferenceRequestRecord, tokenizer: Tokenizer | None
) -> DynamicInferenceRequest:
    """Return the record merged into one request, as users get it. If there is a tokenizer,
    `generated_text` is set. The prompt is removed unless `return_prompt_tokens` is set."""
    add_text(record, tokenizer)
    request = record.merge()
    params = request.sampling_params
    assert params is not None, "each request of an engine has sampling params"
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
    """Return a FAILED request with the error, for a request that has no record. A request has no
    record if it was aborted or refused before an engine ran it."""
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
    """Return the prompt's token ids; [] for a text that the tokenizer cannot encode."""
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]  # arrays hold other kinds of integers
    with suppress(Exception):  # the tokenizer is the user's: it may raise anything
        if tokenizer is not None:
            return encode_prompt(tokenizer, prompt)
    return []


def _drop_prompt(request: DynamicInferenceRequest) -> None:
    """Remove the prompt's tokens from `request`, and their positions from its version spans."""
    start, end = len(request.prompt_tokens), request.num_tokens
    # The first read computes the hashes from the prompt, so read them before the prompt is removed.
    request.precomputed_block_hashes = request.precomputed_block_hashes
    request.prompt_tokens = torch.empty(0, dtype=torch.int64)
    request.policy_spans = request.policy_spans.slice(start, end)
    request.kv_spans = request.kv_spans.slice(start, end)


# ---- generation


class AsyncGeneration(Protocol):
    """Base class of AsyncLLM and ThreadedLLM. It generates with the subclass's methods that queue
    requests.

    A subclass implements `add_groups`, `stream_groups` and `abort_request`, as ServedLLM describes
    them, and `_unfinished`. It can override the other methods whose names begin with an underscore.
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
        """Connect to the engines, if they are in other processes. The public methods call it
        first."""
        return None

    def _end_error(self) -> RolloutError | None:
        """Return the error that ended all pending calls; None while they can still be answered."""
        return None

    def _fails_batch(self, error: BaseException) -> bool:
        """Return whether `generate` raises this error of a request. Otherwise the request is
        returned FAILED."""
        return True

    @asynccontextmanager
    async def _named_errors(self) -> AsyncIterator[None]:
        """Replace errors of the block by `_end_error`, which caused them."""
        yield

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingArgument = None,
        n: int = 1,
        *,
        priority: int = 0,
        on_finished: Callable[[], None] | None = None,
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Run n samples of each prompt to their end and return the requests.

        Returns one request for a single prompt with n = 1. Otherwise returns a list in the order of
        the prompts, with a prompt's samples together. Requests with a higher `priority` run first.
        `on_finished` is called at the end of each sample. Cancelling this call aborts its requests.

        A request that an engine of a fleet refuses, such as one with an id beyond the vocabulary,
        is returned FAILED with its error event. Raises InvalidRequestError for a malformed prompt,
        before anything is queued. Raises EngineStateError after this object was closed, and the
        error that ended the engines.
        """
        await self._connect()
        groups, is_single = as_groups(prompts, sampling_params, n)
        samples = [(prompt, params) for prompt, each in groups for params in each]
        futures = [f for group in self.add_groups(groups, priority=priority) for f in group]
        if on_finished is not None:
            for future in futures:
                future.add_done_callback(lambda ended: ended.cancelled() or on_finished())
        async with self._named_errors():
            try:
                if futures:
                    await asyncio.wait(futures)
            finally:
                for future in futures:
                    future.cancel()  # no-op for a future that is done
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
        """Yield lists of token ids as they are generated, each id once, and at the end the whole
        request.

        If `as_text` is set, pieces of text are yielded instead of ids. Text that may begin a stop
        string is held back. Closing the iterator early aborts the request. Raises
        InvalidRequestError if `as_text` is set and there is no tokenizer, and the errors of
        `generate`.
        """
        await self._connect()
        params = sampling_params or SamplingParams()
        if as_text and self.tokenizer is None:
            raise InvalidRequestError("as_text=True needs a tokenizer; give tokenizer=DIR")
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
                if self._end_error() is not None:
                    raise
                yield failed_request(stream.request_id, prompt, params, error, self.tokenizer)

    async def abort(self, request_ids: Iterable[int] | None = None) -> int:
        """End unfinished requests of this object now, in any state. Returns the number of ended
        requests.

        `request_ids` None ends all of them; ids of other requests are ignored. Callers that wait
        for an ended request get it with the tokens so far, FAILED with the finish reason "abort".
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
        """Return the request of a future that is done. If the future has an error, the request is
        FAILED."""
        error: Any = future.exception()
        if error is None:
            return finished_request(future.result(), self.tokenizer)
        if isinstance(error, LOST):
            error = self._end_error() or error
        return failed_request(future.request_id, prompt, params, error, self.tokenizer)
