"""Serving: what an AsyncLLM does to be reached over HTTP."""

from __future__ import annotations

import asyncio

from rollout.errors import EngineStateError, RolloutError
from rollout.serve.config import ServeConfig
from rollout.serve.llm import ServedLLM
from rollout.serve.server import Server


class Serving:
    """The server of one LLM; there is at most one at a time."""

    def __init__(self, llm: ServedLLM) -> None:
        self._llm = llm
        self._server: Server | None = None
        self._turn = asyncio.Lock()

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port that are listened at; None while nothing is served."""
        server = self._server
        return server.address if server is not None and server.is_listening else None

    @property
    def lost(self) -> RolloutError | None:
        """Why the server has ended by itself; None if it has not."""
        return None if self._server is None else self._server.lost

    async def start(self, config: ServeConfig, *, blocking: bool) -> None:
        """See AsyncLLM.serve."""
        async with self._turn:
            if self._server is not None:
                raise EngineStateError("this AsyncLLM serves already; await stop_serving() first")
            stats = await self._llm.stats()
            server = Server(self._llm, config, stats.max_sequence_length)
            await server.start()
            self._server = server
        if blocking:
            try:
                await server.run()
            finally:
                await self.stop()

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """See AsyncLLM.stop_serving."""
        if self._server is not None:
            server = self._server
            await server.stop(drain_timeout_s)
            if self._server is server:
                self._server = None
