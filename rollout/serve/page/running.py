"""RunningSamples: the newest tokens of a few running samples, for open pages.

`rollout.serve.server` makes it. `rollout.serve.generation` adds samples and tokens.
`rollout.serve.page.routes` counts open pages and reads samples. Nothing is kept while no page is
open.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollout.coordinator.client.streams import RequestFuture, RequestStream
from rollout.requests.token_runs import TokenRun
from rollout.serve.page.recent import MAX_SHOWN_PROMPT_TOKENS
from rollout.serve.token_texts import TokenTexts
from rollout.text import PromptIds

MAX_RUNNING = 6  # samples
MAX_RUNNING_TOKENS = 200  # per sample
# Most samples of a request that the engines stream only for the page.
_MAX_REQUEST_SAMPLES = 64
_MAX_TOKENS_PER_CHARACTER = 4  # a UTF-8 character has up to 4 bytes, and a token can be a byte


class RunningSample:
    """The end of the prompt and the newest MAX_RUNNING_TOKENS tokens of a sample.

    serial: number of the sample among the followed samples, from 0.
    time: Unix time in seconds at which the sample was first followed.
    num_tokens: tokens generated so far.
    """

    def __init__(self, serial: int, prompt: PromptIds) -> None:
        self.serial, self.time = serial, time.time()
        self.num_prompt_tokens, self.num_tokens = len(prompt), 0
        self._prompt = [int(i) for i in prompt[-MAX_SHOWN_PROMPT_TOKENS:]]
        self._tokens: deque[tuple[int, int]] = deque(maxlen=MAX_RUNNING_TOKENS)  # (id, version)

    def add(self, run: TokenRun) -> None:
        versions = run.policy_versions.tolist()
        self._tokens.extend(zip(run.token_ids.tolist(), versions, strict=True))
        self.num_tokens = run.end

    def shown(self, num_sent: int | None, texts: TokenTexts) -> dict[str, Any]:
        """Return as JSON the tokens that a page lacks. `num_sent` is the value of `num_tokens` at
        the page's last update, or None if the page does not know the sample. Then the prompt is
        included."""
        kept = list(self._tokens)
        num_before = self.num_tokens - len(kept)  # tokens that were dropped or never added
        start = max(0, (num_sent or 0) - num_before)
        # The tokens before `start` can be a part of its character.
        context = max(0, start - _MAX_TOKENS_PER_CHARACTER)
        pieces = texts.pieces_of([token for token, _ in kept[context:]], more_follow=True)
        shown: dict[str, Any] = {
            "serial": self.serial,
            "num_tokens": self.num_tokens,
            "tokens": pieces[start - context :],
            "versions": [version for _, version in kept[start:]],
        }
        if num_sent is None:
            shown["time"] = self.time
            shown["num_prompt_tokens"] = self.num_prompt_tokens
            shown["prompt"] = "".join(texts.pieces_of(self._prompt))
        return shown


class RunningSamples:
    """Follows up to MAX_RUNNING samples while a page is open. A streamed sample for which there is
    no room at first is followed later, from its next tokens on."""

    def __init__(self) -> None:
        self._num_pages = self._num_followed = 0
        self._samples: dict[RequestFuture, RunningSample] = {}
        self._readers: set[asyncio.Task[None]] = set()

    @contextmanager
    def page(self) -> Iterator[None]:
        self._num_pages += 1
        try:
            yield
        finally:
            self._num_pages -= 1
            if not self._num_pages:
                self._samples.clear()

    def samples(self) -> list[RunningSample]:
        """Return the followed samples, oldest first."""
        return list(self._samples.values())

    @property
    def _has_room(self) -> bool:
        return self._num_pages > 0 and len(self._samples) < MAX_RUNNING

    def wants_stream(self, num_samples: int) -> bool:
        """Return whether to stream a request of `num_samples` for the page, although its client
        does not."""
        return self._has_room and num_samples <= _MAX_REQUEST_SAMPLES

    def follow(self, future: RequestFuture) -> None:
        """Follow a sample if a page is open and there is room."""
        if self._has_room and not future.done():
            sample = RunningSample(self._num_followed, future.prompt_tokens)
            self._num_followed += 1
            self._samples[future] = sample
            future.add_done_callback(self._end)

    def add(self, future: RequestFuture, run: TokenRun) -> None:
        """Add new tokens of a sample. Follow the sample first if there is room."""
        if not self._num_pages:
            return
        if future not in self._samples:
            self.follow(future)
        if (sample := self._samples.get(future)) is not None:
            sample.add(run)

    def read(self, streams: Sequence[RequestStream]) -> None:
        """Follow samples of a client that does not stream, and read their streams to the end."""
        for stream in streams:
            self.follow(stream.future)
            reader = asyncio.ensure_future(self._read(stream))
            self._readers.add(reader)
            reader.add_done_callback(self._reader_ended)

    async def _read(self, stream: RequestStream) -> None:
        async for item in stream:
            if isinstance(item, TokenRun):
                self.add(stream.future, item)

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        self._readers.discard(reader)
        if not reader.cancelled():
            reader.exception()  # the future raises it, too, for the request's handler

    def _end(self, future: asyncio.Future[Any]) -> None:
        assert isinstance(future, RequestFuture)
        self._samples.pop(future, None)
