"""What the server tells of itself, in the words of vLLM and of SGLang: trainers check it first."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from rollout.serve.control.state import CONTROL
from rollout.serve.errors import json_response
from rollout.serve.limits import Access
from rollout.serve.state import STATE, Route, ServerState
from rollout.telemetry import version


def info_routes() -> list[Route]:
    """Return the routes that both protocols have under the same paths."""
    return [
        Route(method="GET", path="/server_info", handler=_server_info, summary="Server config"),
    ]


async def _server_info(request: web.Request, body: Any) -> web.Response:
    """The keys of vLLM's and of SGLang's answer. All engines together are one rank."""
    state = request.app[STATE]
    return json_response(_vllm_info(state) | _sglang_info(state))
