"""Routes of every server that report readiness, load and version.

`rollout.serve.app` registers them. GET /health and its aliases ask every engine for counters. GET
/health_generate generates one token.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from rollout.control.reports import EngineStats
from rollout.control.state import EngineState
from rollout.sampling_params import SamplingParams
from rollout.serve.access import Access
from rollout.serve.control.state import CONTROL
from rollout.serve.errors import ApiError
from rollout.serve.openapi import installed_version
from rollout.serve.responses import json_response
from rollout.serve.state import STATE, Route, ServerState, get_route

_ANSWER_S = 10.0
_GENERATE_S = 20.0
# Higher than all priorities of clients, so that a queue does not delay the answer.
_PRIORITY = 2**31 - 1


def health_routes() -> list[Route]:
    generates = "Whether a token is generated now"
    return [
        *(
            get_route(path, _health, "Readiness", access=Access.OPEN)
            for path in ("/health", "/health/", "/ping", "/ready")
        ),
        get_route("/health_generate", _Probe().answer, generates, access=Access.OPEN),
        get_route("/load", _load, "Requests in the server now"),
        get_route("/version", _version, "Version of this server"),
    ]


async def _load(request: web.Request, body: Any) -> web.Response:
    limiter = request.app[STATE].limiter
    return json_response({"server_load": limiter.num_running + limiter.num_waiting})


async def _version(request: web.Request, body: Any) -> web.Response:
    return json_response({"version": installed_version()})


async def _health(request: web.Request, body: Any) -> web.Response:
    """Answer 200 if every engine answers. Raises ApiError (503) if an engine does not answer, or if
    generation is not paused and discarded weights were not replaced."""
    await _stats(request.app[STATE])
    if (control := request.app.get(CONTROL)) is not None:
        await control.pausing.require_weights()
    return web.Response()


class _Probe:
    """Handles GET /health_generate. Simultaneous requests share one generated token."""

    def __init__(self) -> None:
        self._running: asyncio.Task[None] | None = None

    async def answer(self, request: web.Request, body: Any) -> web.Response:
        """Answer 200 once a token was generated. Raises ApiError (503) with the reason if none
        was."""
        # The route needs no key, so its load is limited to one token at a time.
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(_generate(request.app[STATE]))
        await asyncio.shield(self._running)
        return web.Response()


async def _generate(state: ServerState) -> None:
    stats = await _stats(state)
    if stats.state is not EngineState.RUNNING:
        raise ApiError(503, f"the engines are {stats.state.name}: nothing is generated")
    params = SamplingParams(num_tokens_to_generate=1)
    ((future,),) = state.llm.add_groups(
        [([0], [params])], priority=_PRIORITY, deadline_s=_GENERATE_S
    )
    try:
        record = await asyncio.wait_for(future, _GENERATE_S)
    except asyncio.TimeoutError:
        raise ApiError(503, f"no token was generated within {_GENERATE_S:g} seconds") from None
    if not record.merge().num_generated_tokens:
        raise ApiError(503, "an engine failed to generate a token; see the server's log")


async def _stats(state: ServerState) -> EngineStats:
    try:
        return await asyncio.wait_for(state.llm.stats(), _ANSWER_S)
    except asyncio.TimeoutError:
        raise ApiError(
            503,
            f"an engine has not answered within {_ANSWER_S:g} seconds; ask again, or look for its "
            "error in the server's log",
        ) from None
