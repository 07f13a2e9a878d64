"""/health: ready when every engine answers."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from rollout.serve.errors import ApiError
from rollout.serve.limits import Access
from rollout.serve.state import STATE, Route

_ANSWER_S = 10.0


def health_routes() -> list[Route]:
    return [
        Route(method="GET", path=path, handler=_health, access=Access.OPEN, summary="Readiness")
        for path in ("/health", "/health/", "/health_generate", "/ping")
    ]


async def _health(request: web.Request, body: Any) -> web.Response:
    try:
        await asyncio.wait_for(request.app[STATE].llm.stats(), _ANSWER_S)
    except asyncio.TimeoutError:
        raise ApiError(503, f"an engine has not answered within {_ANSWER_S:g} seconds") from None
    return web.Response()
