"""Server: listens for the HTTP requests of one LLM until it is stopped.

Used by `rollout.apis.serving`. A Server opens a TCP socket, makes and closes the ServerState, and
handles SIGTERM and SIGINT in `run`. It never closes the LLM.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rollout.addresses import address_error
from rollout.errors import RolloutError
from rollout.models.checkpoints.directory import name_of_directory
from rollout.serve.app import make_app
from rollout.serve.config import ServeConfig
from rollout.serve.generation_config import sampling_defaults
from rollout.serve.live_requests import LiveRequests, RequestLimiter, RequestMetrics
from rollout.serve.llm import ServedLLM
from rollout.serve.openai.chat_template import load_template
from rollout.serve.page.fleet import FleetFeed
from rollout.serve.page.recent import RecentSamples
from rollout.serve.page.running import RunningSamples
from rollout.serve.state import ServerState, VersionLabels
from rollout.serve.token_texts import TokenTexts
from rollout.tool_calls import UNKNOWN, format_of

_logger = logging.getLogger(__name__)
_http_logger = logging.getLogger("rollout.serve.http")  # receives aiohttp's own messages
# Seconds to answer the requests that are aborted at the end of the drain.
_LAST_ANSWERS_S = 5.0


class _ClientFaults(logging.Filter):
    """Shortens errors of malformed requests and cut connections to one INFO line without
    traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        fault = record.exc_info[1] if record.exc_info else None
        if isinstance(fault, HttpProcessingError | web.RequestPayloadError | ConnectionError):
            record.levelno, record.levelname = logging.INFO, "INFO"
            reason = " ".join(str(fault).split())
            record.msg, record.args = f"{record.getMessage()}: {reason:.200}", ()
            record.exc_info = record.exc_text = None
        return True


_http_logger.addFilter(_ClientFaults())


class Server:
    """Serves an LLM that has started, in the LLM's event loop.

    lost: the error that ended the engines, or None while they run.
    """

    def __init__(self, llm: ServedLLM, config: ServeConfig, max_sequence_length: int) -> None:
        """Make the server without listening. Raises ConfigError and ModelError.

        max_sequence_length: most tokens of a sequence that the engines accept.
        """
        self.config = config
        directory, recent = llm.model_directory, RecentSamples()
        template = load_template(llm.tokenizer, config.chat_template)
        self.state = ServerState(
            llm=llm,
            config=config,
            served_name=config.served_model_name
            or ("model" if directory is None else name_of_directory(directory)),
            created=int(time.time()),
            max_model_len=min(config.max_model_len or max_sequence_length, max_sequence_length),
            labels=VersionLabels(),
            limiter=RequestLimiter(
                max_running=config.max_running_requests, max_waiting=config.max_waiting_requests
            ),
            live=LiveRequests(llm.abort_request, on_end=recent.add_ended),
            texts=TokenTexts(llm.tokenizer, config.max_text_characters),
            sampling_defaults=sampling_defaults(directory, config.generation_config),
            template=template,
            reply_format=format_of(
                None if template is None else template.all_sources,
                tool_call_parser=config.tool_call_parser,
                reasoning_parser=config.reasoning_parser,
            ),
            metrics=RequestMetrics(),
            feed=FleetFeed(llm),
            recent=recent,
            running=RunningSamples(),
        )
        self._runner = web.AppRunner(
            make_app(self.state),
            handle_signals=False,
            handler_cancellation=True,  # a client that disconnects ends its handler
            access_log=None,
            logger=_http_logger,
            keepalive_timeout=config.keepalive_timeout_s,
            shutdown_timeout=_LAST_ANSWERS_S,
        )
        self._site: web.TCPSite | None = None
        self._stop_requested = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.lost: RolloutError | None = None

    @property
    def is_listening(self) -> bool:
        return bool(self._runner.addresses)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._runner.addresses[0][:2]
        return str(host), int(port)

    async def start(self) -> None:
        """Begin to listen. Raises ConfigError if the address cannot be bound. The server stops by
        itself if the engines fail."""
        config = self.config
        await self._runner.setup()
        self._site = web.TCPSite(
            self._runner, config.host, config.port, backlog=config.max_connections_backlog
        )
        try:
            await self._site.start()
        except OSError as fault:
            await self._runner.cleanup()
            raise address_error(config.host, config.port, fault) from fault
        host, port = self.address
        _logger.info("serving %s at http://%s:%d", self.state.served_name, host, port)
        self._report_format()
        self._watching = asyncio.ensure_future(self._end_when_lost())

    def _report_format(self) -> None:
        template, shown = self.state.template, self.state.reply_format
        if template is None:
            return
        _logger.info("%s", shown.summary())
        is_guess = self.config.tool_call_parser == "auto" and shown.calls == UNKNOWN
        if is_guess and "tools" in (template.source or ""):
            _logger.warning(
                "the chat template takes tools but shows no known format of tool calls; "
                "<tool_call> tags and plain JSON are read as calls; "
                "set tool_call_parser to the model's format"
            )

    async def run(self) -> None:
        """Wait for SIGTERM, SIGINT or a call of `stop`, then stop. Raises `lost` if the engines
        have failed."""
        with self._stopping_on_signals():
            await self._stop_requested.wait()
        await self.stop()
        if self.lost is not None:
            raise self.lost

    async def _end_when_lost(self) -> None:
        self.lost = await self.state.llm.lost()
        _logger.error("the server stops because its engines failed; restart it: %s", self.lost)
        await self.stop(drain_timeout_s=0.0)

    @contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        """Request the stop on SIGTERM and SIGINT during the block. Does nothing outside the main
        thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
        before = [signal.getsignal(number) for number in numbers]
        for number in numbers:
            loop.add_signal_handler(number, self._stop_requested.set)
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Refuse new requests, wait for running requests, then abort the unfinished ones.
        `drain_timeout_s` is the longest wait in seconds, by default `config.drain_timeout_s`. A
        second call waits for the first one."""
        self._stop_requested.set()
        if self._stopping is None:
            seconds = self.config.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
            self._stopping = asyncio.ensure_future(self._stop(seconds))
        await asyncio.shield(self._stopping)

    async def _stop(self, drain_timeout_s: float) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self.state.limiter.close("server", "the server is shutting down")
        if self._site is not None:
            await self._site.stop()
        if not await self.state.limiter.is_idle_within(drain_timeout_s):
            _logger.info("aborting %d requests", self.state.live.num_requests)
            with suppress(RolloutError):  # the fleet may have ended
                self.state.live.abort()
            await self.state.limiter.is_idle_within(_LAST_ANSWERS_S)
        self.state.feed.close()
        self.state.texts.close()
        await self._runner.cleanup()
