"""The HTTP responses with JSON: of values, and of the errors of this package and of aiohttp.

`json_response` makes the replies of most routes. `rollout.serve.app` and
`rollout.serve.event_stream` report errors.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from rollout.errors import (
    ClientStateError,
    ConfigError,
    ContextOverflowError,
    CoordinatorLostError,
    EngineStateError,
    InvalidRequestError,
    RolloutError,
    WeightUpdateError,
)
from rollout.serve.errors import ApiError, ErrorForm


def api_error_of(error: Exception) -> ApiError | None:
    """Return the ApiError that reports an error of this package or of aiohttp; None for others."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, web.HTTPException):
        return ApiError(error.status, error.text or error.reason)
    if isinstance(error, InvalidRequestError | ConfigError | ContextOverflowError):
        return ApiError(400, str(error))
    if isinstance(error, EngineStateError | CoordinatorLostError | ClientStateError):
        return ApiError(503, str(error))
    if isinstance(error, WeightUpdateError):
        return ApiError(400, str(error))
    if isinstance(error, RolloutError):
        return ApiError(500, str(error))
    return None


def error_response(error: ApiError, form: ErrorForm) -> web.Response:
    """Return the response for `error` in the form of a protocol."""
    response = json_response(form(error), status=error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def json_response(content: Any, *, status: int = 200) -> web.Response:
    """Return a response with `content`, which may hold msgspec structs, as JSON."""
    return web.Response(
        body=msgspec.json.encode(content), status=status, content_type="application/json"
    )
