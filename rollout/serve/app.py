"""Builds the aiohttp application of a server, which checks, decodes and dispatches every request.

Used by `rollout.serve.server` (`make_app`) and by scripts/http_fields.py (`routes_of`). The
application counts each request in the server's metrics and turns exceptions into JSON errors.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from rollout.serve.access import Access, Keys, Senders
from rollout.serve.config import CONTROL_PROTOCOLS
from rollout.serve.control.handlers import info_routes
from rollout.serve.control.state import CONTROL, close_control, make_control
from rollout.serve.errors import ApiError, openai_form
from rollout.serve.fields import Fields, converted, unreadable_value
from rollout.serve.health import health_routes
from rollout.serve.metrics import metrics_routes
from rollout.serve.openai.chat import chat_routes
from rollout.serve.openai.completions import completion_routes
from rollout.serve.openai.model import model_routes
from rollout.serve.openai.tokens_in_out import generate_routes
from rollout.serve.openapi import document
from rollout.serve.page.routes import page_routes
from rollout.serve.responses import api_error_of, error_response, json_response
from rollout.serve.sglang import generate as sglang_generate
from rollout.serve.sglang.control import sglang_routes
from rollout.serve.state import STATE, Route, ServerState
from rollout.serve.vllm.control import vllm_routes

_logger = logging.getLogger(__name__)
_CLIENT_HAS_GONE = 499  # proxies use the same number
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(state: ServerState) -> web.Application:
    """Return the application with the routes of the protocols in `state.config`."""
    app = web.Application(
        client_max_size=state.config.max_body_bytes, middlewares=[_answer_unknown_paths]
    )
    app[STATE] = state
    if set(CONTROL_PROTOCOLS) & set(state.config.protocols):
        app[CONTROL] = make_control(state)
        app.on_shutdown.append(close_control)
    keys, senders = Keys(state.config), Senders(state.config)
    for route in routes_of(state.config.protocols):
        app.router.add_route(route.method, route.path, _guarded(route, senders, keys))
    return app


def routes_of(protocols: Sequence[str]) -> list[Route]:
    """Return the routes of `protocols` and the routes of every server: health, metrics and
    pages."""
    routes = [*health_routes(), *metrics_routes()]
    if "openai" in protocols:
        routes += model_routes()
        routes += completion_routes()
        routes += chat_routes()
        routes += generate_routes()
    if set(CONTROL_PROTOCOLS) & set(protocols):
        routes += info_routes()
    if "vllm" in protocols:
        routes += vllm_routes()
    if "sglang" in protocols:
        routes += [*sglang_generate.generate_routes(), *sglang_routes()]
    return [*routes, _openapi_route(routes), *page_routes()]


def _openapi_route(routes: Sequence[Route]) -> Route:
    content = document(routes)

    async def answer(request: web.Request, body: Any) -> web.Response:
        return json_response(content)

    return Route(method="GET", path="/openapi.json", handler=answer, summary="This document")


def _guarded(route: Route, senders: Senders, keys: Keys) -> _Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        start, status = time.monotonic(), _CLIENT_HAS_GONE
        try:
            response = await _answered(route, senders, keys, request)
            status = response.status
            return response
        finally:
            metrics = request.app[STATE].metrics
            metrics.add(route.method, route.path, status, time.monotonic() - start)

    return handle


async def _answered(
    route: Route, senders: Senders, keys: Keys, request: web.Request
) -> web.StreamResponse:
    """Check the sender, key, query and body, then return the handler's response or a JSON error."""
    try:
        senders.check(request, route.access)
        keys.check(request.headers.get("Authorization"), route.access)
        # An unknown field rarely matters to a generation, but an operation must be done in full.
        ignores_unknown = route.access is not Access.ADMIN
        if route.query is not None:
            check_query(request.query, route.query, ignores_unknown=ignores_unknown)
        body = None
        if route.body is not None:
            body = decoded(await _read(request), route.body, ignores_unknown=ignores_unknown)
        return await _handled(route, request, body)
    except ConnectionError:
        _logger.info("%s %s: the client has disconnected", request.method, route.path)
        return web.Response(status=_CLIENT_HAS_GONE)  # for the metrics alone
    except Exception as fault:
        error = api_error_of(fault)
        if error is None:
            _logger.exception("%s %s failed", request.method, request.path)
            error = ApiError(500, f"the server failed: {type(fault).__name__}")
        return error_response(error, route.errors)


async def _handled(route: Route, request: web.Request, body: Any) -> web.StreamResponse:
    """Call the handler. A generation first waits for a slot of the limiter. An operation
    (Access.ADMIN) continues after its client disconnects, unless `route.ends_with_client`."""
    control = request.app.get(CONTROL)
    if route.generates:
        if control is not None:
            await control.pausing.require_weights()
        async with request.app[STATE].limiter.slot():
            return await route.handler(request, body)
    work = route.handler(request, body)
    if control is None or route.access is not Access.ADMIN or route.ends_with_client:
        return await work
    return await control.operations.run(work)


async def _read(request: web.Request) -> bytes:
    """Return the bytes of the body. Raises ApiError for a body that is too large, too slow or
    malformed."""
    config = request.app[STATE].config
    try:
        return await asyncio.wait_for(request.read(), config.body_timeout_s)
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(
            413, f"the body is larger than max_body_bytes={config.max_body_bytes}"
        ) from None
    except asyncio.TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {config.body_timeout_s:g} seconds"
        ) from None
    except web.RequestPayloadError:
        raise ApiError(
            400, "the body does not match its headers Content-Encoding and Transfer-Encoding"
        ) from None


def check_query(query: Mapping[str, str], kind: type[Fields], *, ignores_unknown: bool) -> None:
    """Raise ApiError for an unknown parameter or an invalid value. See `fields.converted`."""
    converted(dict(query), kind, ignores_unknown=ignores_unknown, strict=False)


def decoded(body: bytes, kind: type[Fields], *, ignores_unknown: bool) -> Fields:
    """Return the JSON body as `kind`. An empty body counts as {}. Raises ApiError if the body is
    not JSON or not a valid `kind`."""
    try:
        if not body.isascii():
            body.decode()  # msgspec does not check fields that it skips
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as fault:
        if (given := _given(body)) is None:
            raise unreadable_value(fault, None) from None
        return converted(given, kind, ignores_unknown=ignores_unknown)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise ApiError(400, f"the body cannot be read: {fault}") from None


def _given(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None


@web.middleware
async def _answer_unknown_paths(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as fault:
        reason = f"{request.method} {request.path} is not served: {fault.reason}"
        response = error_response(ApiError(fault.status, reason), openai_form)
        if isinstance(fault, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = ", ".join(sorted(fault.allowed_methods))
        return response
