"""Makes the JSON responses of values and of errors.

Used by `rollout.serve` (app, event_stream, health, control.handlers, openai.model, openai.reply,
sglang, vllm). `rollout.serve.app` and `rollout.serve.event_stream` report exceptions as errors.
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
    """Return the ApiError that reports `error`, or None if it is no error of rollout or aiohttp."""
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
    """Return the response for `error`. `form` makes its JSON body."""
    response = json_response(form(error), status=error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def json_response(content: Any, *, status: int = 200) -> web.Response:
    """Return a response with `content` as JSON. `content` can contain msgspec structs."""
    return web.Response(
        body=msgspec.json.encode(content), status=status, content_type="application/json"
    )
