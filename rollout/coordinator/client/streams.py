"""RequestFuture and RequestStream: await a request's record, or iterate over its tokens first.

Made by the other modules of `rollout.coordinator.client`, and by `rollout.apis.threaded_llm` for
engines of its own process. Used by `rollout.apis.async_llm`, `rollout.apis.fleet_runtime`,
`rollout.apis.streaming`, `rollout.serve` and users.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from rollout.errors import RolloutError
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.token_runs import TokenRun, join_runs
from rollout.sampling_params import SamplingParams
from rollout.text import PromptIds

Record = DynamicInferenceRequestRecord


class RequestFuture(asyncio.Future[Record]):
    """The future of a request's record. Cancelling it aborts the request. `prompt_tokens` holds the
    submitted token ids."""

    def __init__(
        self, request_id: int, prompt_tokens: PromptIds, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(loop=loop)
        self.request_id, self.prompt_tokens = request_id, prompt_tokens


def set_exception(future: asyncio.Future[Any], error: RolloutError) -> None:
    """Fail a future, unless it is done."""
    if not future.done():
        future.set_exception(error)


class StreamedTokens:
    """A queue of one request's tokens, in order. `num_tokens` counts the tokens that have
    arrived."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._runs: asyncio.Queue[TokenRun | None] = asyncio.Queue()  # None marks the end

    def add(self, run: TokenRun) -> None:
        """Add the new tokens of `run`. Drops `run` if tokens before it are missing."""
        # Missing tokens are sent again with all later tokens, or come with the record.
        if run.offset <= self.num_tokens < run.end:
            self._runs.put_nowait(run.from_offset(self.num_tokens))
            self.num_tokens = run.end

    def end(self, _: object = None) -> None:
        """Mark the end of the tokens, at which `next` returns None."""
        self._runs.put_nowait(None)

    async def next(self) -> TokenRun | None:
        """Wait for the next run of tokens. Returns None at the end."""
        return await self._runs.get()


class RequestStream:
    """Iterates over the tokens of one request, then over its record as the last item. Tokens come
    in runs of at least `interval` tokens, except the last run. Closing the stream early aborts the
    request."""

    def __init__(self, future: RequestFuture, tokens: StreamedTokens, interval: int) -> None:
        self.future, self.prompt_tokens = future, future.prompt_tokens
        self._items = _items_of(future, tokens, interval)

    @property
    def request_id(self) -> int:
        return self.future.request_id

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> TokenRun | Record:
        return await self._items.__anext__()

    async def aclose(self) -> None:
        await self._items.aclose()
        self.future.cancel()  # if the iteration has not begun


def streams_of(
    futures: Sequence[RequestFuture],
    params: Sequence[SamplingParams],
    tokens_of: Callable[[RequestFuture], StreamedTokens],
) -> list[RequestStream]:
    """Return a stream for each future. `params` are the futures' sampling params, in the same
    order. `tokens_of` returns the streamed tokens of a future's request."""
    return [
        RequestStream(future, tokens_of(future), own.streaming_interval)
        for future, own in zip(futures, params, strict=True)
    ]


async def _items_of(
    future: RequestFuture, tokens: StreamedTokens, interval: int
) -> AsyncGenerator[TokenRun | Record, None]:
    held: list[TokenRun] = []  # fewer than `interval` tokens
    try:
        while (run := await tokens.next()) is not None:
            held.append(run)
            if sum(map(len, held)) >= interval:
                yield join_runs(held)
                held = []
        record = await future
        if (rest := TokenRun.of(record, tokens.num_tokens)) is not None:
            held.append(rest)
        if held:
            yield join_runs(held)
        yield record
    finally:
        future.cancel()
