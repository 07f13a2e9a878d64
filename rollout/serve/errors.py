"""ApiError: an error reported to a client, and its JSON form in each protocol.

All modules of rollout.serve raise it; `rollout.serve.app` and `rollout.serve.event_stream` send it.
`rollout.cli.generate` catches it. `json_response` makes the replies of most routes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """An error reported to the client as an HTTP status and message.

    param: name of the field at fault. retry_after_s: value of a Retry-After header. type: OpenAI's
    name of the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        # The message may quote bytes of a path or a header that are not text.
        message = message.encode(errors="replace").decode()
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.type = _TYPES.get(status, "BadRequestError" if status < 500 else _TYPES[500])
        self.retry_after_s = retry_after_s


# Returns the JSON body of an error in the form of one protocol.
ErrorForm = Callable[[ApiError], Mapping[str, Any]]


def openai_form(error: ApiError) -> Mapping[str, Any]:
    """Return the JSON body of an error of /v1, /inference, /tokenize or vLLM's control routes."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.status,
        }
    }


def sglang_form(error: ApiError) -> Mapping[str, Any]:
    """Return the JSON body of an error of SGLang's /generate."""
    return {"error": {"message": error.message}}


def sglang_admin_form(error: ApiError) -> Mapping[str, Any]:
    """Return the JSON body of an error of SGLang's control routes."""
    return {"success": False, "message": error.message}


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
