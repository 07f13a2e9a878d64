"""The HTTP servers of AsyncLLM (Serving) and of an LLM's engine in this process (EngineServer).

`rollout.apis.async_llm` uses Serving, and `rollout.apis.llm` uses EngineServer, for `serve` and
`stop_serving`. Serving starts a `rollout.serve.server.Server`. EngineServer starts two threads.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from rollout.apis.llm import LLM, own_runtime
from rollout.apis.threaded_llm import ThreadedLLM
from rollout.control.state import EngineState
from rollout.errors import EngineStateError, RolloutError
from rollout.extras import extra_needed
from rollout.serve.config import ServeConfig
from rollout.serve.llm import ServedLLM

if TYPE_CHECKING:
    from rollout.serve.server import Server
    from rollout.serve.state import ServerState


class Serving:
    """The HTTP server of one LLM. At most one runs at a time."""

    def __init__(self, llm: ServedLLM) -> None:
        self._llm = llm
        self._server: Server | None = None
        self._starting = asyncio.Lock()

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of the server; None if no server listens."""
        server = self._server
        return server.address if server is not None and server.is_listening else None

    @property
    def state(self) -> ServerState | None:
        """State of the server; None if there is no server."""
        return None if self._server is None else self._server.state

    @property
    def lost(self) -> RolloutError | None:
        """The error that ended the server; None if there is no such error."""
        return None if self._server is None else self._server.lost

    async def start(self, config: ServeConfig, *, blocking: bool) -> None:
        """Start the server, and wait for its end if `blocking`. See AsyncLLM.serve. Raises
        EngineStateError if a server runs already, and ConfigError if the extra `serve` is not
        installed."""
        with extra_needed("serve", "serving over HTTP"):
            from rollout.serve.server import Server
        async with self._starting:
            if self._server is not None:
                raise EngineStateError("this AsyncLLM serves already; await stop_serving() first")
            stats = await self._llm.stats()
            server = Server(self._llm, config, stats.max_sequence_length)
            await server.start()
            self._server = server
        if blocking:
            await self.run()

    async def run(self) -> None:
        """Wait until the server is stopped, gets SIGTERM or SIGINT, or its engines fail, and then
        end it. Raises the error of the engines. Returns at once if there is no server."""
        if self._server is not None:
            try:
                await self._server.run()
            finally:
                await self.stop()

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        if self._server is not None:
            server = self._server
            await server.stop(drain_timeout_s)
            if self._server is server:
                self._server = None


class EngineServer:
    """Serves the engine of an LLM in this process. The engine runs in the thread of a ThreadedLLM,
    and the server in the event loop of another thread."""

    def __init__(self, llm: LLM, config: ServeConfig) -> None:
        """Start the threads, and wait until the server listens at `self.address` (host, port).
        Raises EngineStateError if the engine is not RUNNING or has requests. Raises ConfigError if
        the LLM's engine is not in this process, or if the server cannot listen at its address."""
        engine = own_runtime(llm, "llm.serve").engine
        if engine.state is not EngineState.RUNNING or engine.has_unfinished_requests():
            raise EngineStateError(
                f"the engine is {engine.state.name} with {len(engine.request_ids())} requests; "
                "unpause it and collect() them before it is served"
            )
        self._llm, self._config = llm, config
        self._serving: Serving | None = None
        self._started: Future[tuple[str, int]] = Future()
        self._stop: Future[float | None] = Future()  # drain_timeout_s; set to end the server
        self._thread = threading.Thread(target=self._run, name="http server", daemon=True)
        self._thread.start()
        try:
            self.address = self._started.result()
        except BaseException:
            self.stop_serving(0.0)
            raise

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as fault:
            if self._started.done():
                raise
            self._started.set_exception(fault)

    async def _serve(self) -> None:
        async with ThreadedLLM(self._llm) as threaded:
            self._serving = Serving(threaded)
            await self._serving.start(self._config, blocking=False)
            assert self._serving.address is not None, "it listens"
            self._started.set_result(self._serving.address)
            await self._serving.stop(await asyncio.wrap_future(self._stop))

    def require_serving(self) -> None:
        """Raise the error that ended the server, if there is one."""
        if self._serving is not None and (error := self._serving.lost) is not None:
            raise error

    def stop_serving(self, drain_timeout_s: float | None) -> None:
        """End the server and its threads. Unfinished requests are aborted after `drain_timeout_s`.
        A second call only waits. See LLM.stop_serving."""
        if not self._stop.done():
            self._stop.set_result(drain_timeout_s)
        self._thread.join()
