"""What users of AsyncLLM see of a client's stream, and the abort of a client's requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing

from rollout.apis.results import failed_request, finished_request
from rollout.coordinator.client.inference_client import ClientStateError, InferenceClient
from rollout.coordinator.client.streams import RequestFuture, RequestStream
from rollout.coordinator.client.submission import Prompt
from rollout.coordinator.net.dealer import CoordinatorLostError
from rollout.coordinator.protocol.token_runs import TokenRun
from rollout.errors import RequestAbortedError, RolloutError
from rollout.generated_text import StreamedText
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.text import Tokenizer

# Errors that fail all pending requests at once.
LOST = (CoordinatorLostError, ClientStateError)


async def streamed_items(
    stream: RequestStream,
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    *,
    as_text: bool,
    cut_short: Callable[[], RolloutError | None],
) -> AsyncGenerator[list[int] | str | DynamicInferenceRequest, None]:
    """Token ids as they come, or pieces of text, then the whole request. See AsyncLLM.stream.

    `cut_short` says why pending verbs get no answer, None if they may.
    """
    text = None
    if as_text and tokenizer is not None:
        text = StreamedText(tokenizer, params, stream.prompt_tokens)
    async with aclosing(stream):
        try:
            async for item in stream:
                if isinstance(item, TokenRun):
                    ids = item.token_ids.tolist()
                    if piece := ids if text is None else text.push(ids):
                        yield piece
                    continue
                request = finished_request(item, tokenizer)
                if text is not None and (rest := text.finish(request.generated_text)):
                    yield rest
                yield request
        except RequestAbortedError as error:  # before an engine had it
            if cut_short() is not None:
                raise
            yield failed_request(stream.request_id, prompt, params, error, tokenizer)


async def wait_for_requests(
    futures: Sequence[RequestFuture], *, cut_short: Callable[[], RolloutError | None]
) -> None:
    """Wait until all are done; cancelled, it aborts the rest. Raises an error that fails all
    pending requests at once. `cut_short` as for `streamed_items`.
    """
    try:
        if futures:
            await asyncio.wait(futures)
        for future in futures:
            error = future.exception()
            if isinstance(error, LOST) or (error is not None and cut_short()):
                raise error
    finally:
        for future in futures:
            future.cancel()  # those that are not done


async def abort_requests(client: InferenceClient, request_ids: Iterable[int] | None) -> int:
    """End unfinished requests of the client, None for all of them, and wait for their records.

    Returns how many there were. Other ids are ignored.
    """
    unfinished = client.completion_futures
    wanted = unfinished if request_ids is None else dict.fromkeys(request_ids)
    futures = [unfinished[request_id] for request_id in wanted if request_id in unfinished]
    for future in futures:
        client.abort(future.request_id)
    if futures:
        await asyncio.wait(futures)
    return len(futures)
