"""ApiError: an error reported to a client, and its JSON form in each protocol.

Most modules of rollout.serve raise it. `rollout.serve.app` and `rollout.serve.event_stream` send
it. `rollout.cli.generate`, which runs without aiohttp, catches it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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

    param: name of the field at fault.
    retry_after_s: value of the header Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        # The message can quote bytes of a path or a header that are not text.
        message = message.encode(errors="replace").decode()
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.type = _TYPES.get(status, "BadRequestError" if status < 500 else _TYPES[500])
        self.retry_after_s = retry_after_s


# Returns the JSON body of an error in the form of one protocol.
ErrorForm = Callable[[ApiError], Mapping[str, Any]]


def openai_form(error: ApiError) -> Mapping[str, Any]:
    """Return the JSON body of an error in the openai and vllm protocols."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.status,
        }
    }


def sglang_form(error: ApiError) -> Mapping[str, Any]:
    """Return the JSON body of an error of SGLang's route /generate."""
    return {"error": {"message": error.message}}


def sglang_admin_form(error: ApiError) -> Mapping[str, Any]:
    """Return the JSON body of an error of SGLang's control routes."""
    return {"success": False, "message": error.message}
