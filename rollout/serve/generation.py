"""Generation: the samples of one HTTP request, from submission to end.

Used by `rollout.serve.openai` (reply, tokens_in_out) and `rollout.serve.sglang.generate`. It
submits samples to the LLM and registers them in LiveRequests until they end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing

from rollout.coordinator.client.streams import RequestFuture, RequestStream
from rollout.errors import MaxSequenceLengthOverflowError, RequestAbortedError, RolloutError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.token_runs import TokenRun
from rollout.sampling_params import SamplingParams
from rollout.serve.errors import ApiError
from rollout.serve.state import ServerState
from rollout.step.seeds import params_of_sample

# Most items that `_merged` keeps for a slow reader.
_MAX_RUNS_WAITING = 64

Request = DynamicInferenceRequest


class Generation:
    """The samples of one request. Sample `i` belongs to prompt `i // n`. Each sample gets the seed
    that `LLM.generate` gives it. `results` and `stream` submit the samples, so call only one of
    them. Cancelling `results` or closing `stream` aborts unfinished samples."""

    def __init__(
        self,
        state: ServerState,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        n: int = 1,
        name: str,
        priority: int = 0,
    ) -> None:
        """Prepare the samples without submitting them. `name` is the request's name in
        LiveRequests. Raises ApiError if `n` or the number of samples is out of range."""
        config = state.config
        if not 1 <= n <= config.max_n:
            raise ApiError(400, f"n={n} must be in [1, {config.max_n}]", param="n")
        if n * len(prompts) > config.max_samples:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with n={n} are more than max_samples={config.max_samples} "
                "samples; send fewer prompts",
                param="n",
            )
        self._state, self._name, self._priority = state, name, priority
        self._groups = [
            (prompt, [params_of_sample(params, index, sample) for sample in range(n)])
            for index, prompt in enumerate(prompts)
        ]
        self._samples = [(prompt, own) for prompt, each in self._groups for own in each]

    def prompt_of(self, index: int) -> Sequence[int]:
        return self._samples[index][0]

    async def results(self) -> list[Request]:
        """Submit all samples, wait for them, and return their requests in order. An aborted sample
        has its tokens so far. Raises ApiError or RolloutError if a sample failed."""
        state = self._state
        if state.running.wants_stream(len(self._samples)):
            streams = self._add_streams()
            futures = [stream.future for stream in streams]
            state.running.read(streams)
        else:
            added = state.llm.add_groups(
                self._groups, priority=self._priority, deadline_s=state.config.request_timeout_s
            )
            futures = [future for group in added for future in group]
        try:
            with state.live.of(self._name, futures):
                await asyncio.wait(futures)
            return [self._result(i, future) for i, future in enumerate(futures)]
        finally:
            for future in futures:
                future.cancel()  # does nothing to a future that is done

    async def stream(self) -> AsyncGenerator[tuple[int, TokenRun | Request], None]:
        """Submit the samples. Yield (sample index, new tokens) as tokens arrive. The last item of
        each sample is (sample index, finished request). Raises the errors of `results`."""
        streams = self._add_streams()
        futures = [stream.future for stream in streams]
        async with AsyncExitStack() as stack:
            for stream in streams:
                await stack.enter_async_context(aclosing(stream))
                self._state.running.follow(stream.future)
            stack.enter_context(self._state.live.of(self._name, futures))
            each = [
                self._items(i, stream, future)
                for i, (stream, future) in enumerate(zip(streams, futures, strict=True))
            ]
            items = each[0] if len(each) == 1 else _merged(each)
            async with aclosing(items):
                async for item in items:
                    yield item

    def _add_streams(self) -> list[RequestStream]:
        added = self._state.llm.stream_groups(
            self._groups,
            priority=self._priority,
            deadline_s=self._state.config.request_timeout_s,
        )
        return [stream for group in added for stream in group]

    async def _items(
        self, index: int, tokens: AsyncIterator[object], future: RequestFuture
    ) -> AsyncGenerator[tuple[int, TokenRun | Request], None]:
        try:
            async for item in tokens:
                if isinstance(item, TokenRun):
                    self._state.running.add(future, item)
                    yield index, item
        except RolloutError:
            await asyncio.wait([future])  # `_result` raises its error
        yield index, self._result(index, future)

    def _result(self, index: int, future: RequestFuture) -> Request:
        """Return the finished request. Raises the sample's error, unless it was aborted."""
        error = future.exception()
        if isinstance(error, RolloutError) and not isinstance(error, RequestAbortedError):
            raise _worded_for_clients(error)
        request = self._state.llm.request_of(future, *self._samples[index])
        if isinstance(error, RequestAbortedError):
            request.finish_reason = "abort"  # the request was in no engine yet
        elif request.finish_reason == "error":
            raise _worded_for_clients(request.last_error or RolloutError("the request failed"))
        return request


def _worded_for_clients(error: BaseException) -> BaseException:
    """Return `error`, or an ApiError with OpenAI's message if the context was too short."""
    if isinstance(error, MaxSequenceLengthOverflowError):  # clients search the message
        return ApiError(400, f"This model's maximum context length is exceeded: {error}")
    return error


async def _merged(
    each: Sequence[AsyncIterator[tuple[int, TokenRun | Request]]],
) -> AsyncGenerator[tuple[int, TokenRun | Request], None]:
    """Yield the items of all iterators as they arrive. Raises the first error of an iterator."""
    arrived: asyncio.Queue[tuple[int, TokenRun | Request] | Exception] = asyncio.Queue(
        _MAX_RUNS_WAITING
    )

    async def pump(items: AsyncIterator[tuple[int, TokenRun | Request]]) -> None:
        try:
            async for item in items:
                await arrived.put(item)
        except Exception as fault:  # raised in the reading task
            await arrived.put(fault)

    pumps = [asyncio.ensure_future(pump(items)) for items in each]
    try:
        num_left = len(each)
        while num_left:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            num_left -= not isinstance(item[1], TokenRun)
            yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
