"""The exceptions of all packages, and their encoding as messages between processes.

All packages raise them. `rollout.coordinator`, `rollout.launch`, `rollout.parallel`,
`rollout.tensor_parallel`, `rollout.serve.control`, `rollout.requests.event`,
`rollout.child_process` and `rollout.apis` encode or decode them.

    RolloutError
    ├── ConfigError (ValueError)            a configuration that cannot work
    ├── InvalidRequestError (ValueError)    a malformed request, refused before anything is queued
    ├── EventPayloadError (ValueError)      a payload that the event's type does not take
    ├── EngineStateError                    a call that the engine's state does not allow
    ├── WeightUpdateError                   a weight update that was refused or rolled back
    ├── ModelError                          an unknown model type, or a checkpoint that does not fit
    ├── NonFiniteLogitsError                NaN or infinity in logits to be sampled
    ├── DetokenizeError                     the tokenizer raised on tokens of a request
    ├── ProtocolError                       a message that cannot be understood
    ├── LockstepError                       a rank of one engine died, timed out or diverged
    ├── IntegrityError                      parts of an engine contradict each other, by a bug
    ├── CoordinatorLostError                the coordinator of a fleet does not answer
    ├── ClientStateError                    a client that is not started, or has ended
    ├── RequestAbortedError                 the request was aborted before its end
    ├── ContextOverflowError                a request that does not fit the engine, now or ever
    │   ├── RequestOverflowError            no row left
    │   ├── TokenOverflowError              no token left in the step
    │   ├── BlockOverflowError              no KV block left
    │   ├── TokenLimitClamped               fewer new tokens than the request asked for
    │   └── MaxSequenceLengthOverflowError  longer than any sequence may be; never transient
    └── RemoteError                         an error of another process whose type is unknown here
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any


class RolloutError(Exception):
    """Base of all errors here. `is_transient` is whether the same call or request may succeed
    later."""

    is_transient: bool = False


class ConfigError(RolloutError, ValueError):
    """A configuration that cannot work. The message names the given values and the legal ones."""


class InvalidRequestError(RolloutError, ValueError):
    """A malformed request. The message names the field, its value and the range."""


class EventPayloadError(RolloutError, ValueError):
    """An event was created with a payload that its type does not take."""


class EngineStateError(RolloutError):
    """A call that the engine's state does not allow."""


class WeightUpdateError(RolloutError):
    """A weight update was refused or rolled back. Unless the rollback failed too, weights and
    version are as before."""


class ModelError(RolloutError):
    """An unknown model type, or a checkpoint that does not fit its model."""


class NonFiniteLogitsError(RolloutError):
    """The logits of a token to be sampled contain NaN or infinity."""


class DetokenizeError(RolloutError):
    """The tokenizer raised on generated tokens. The request keeps its tokens and has no text."""


class ProtocolError(RolloutError):
    """A message that cannot be understood: wrong fields, unknown header, broken encoding."""


class LockstepError(RolloutError):
    """A rank of an engine died, timed out or diverged from the others. Create a new engine."""


class IntegrityError(RolloutError):
    """Parts of an engine contradict each other, by a bug. The message lists the violated
    invariants."""


class CoordinatorLostError(RolloutError):
    """The coordinator does not answer, has ended, or no longer knows the request or command."""

    is_transient = True


class ClientStateError(RolloutError):
    """A client was used before its start, after its end, or outside of its event loop."""


class RequestAbortedError(RolloutError):
    """The request was aborted before its end. Its record has the tokens so far."""


class ContextOverflowError(RolloutError):
    """Request `request_id` does not fit. `message` is the reason; None if unknown."""

    def __init__(
        self, request_id: int | None, message: str | None = None, *, is_transient: bool = True
    ) -> None:
        super().__init__(request_id, message)
        self.request_id = request_id
        self.message = message
        self.is_transient = is_transient

    def __str__(self) -> str:
        request = f"request {'--' if self.request_id is None else self.request_id}"
        return request if self.message is None else f"{request} | {self.message}"


class RequestOverflowError(ContextOverflowError):
    """No row is left for another running request."""


class TokenOverflowError(ContextOverflowError):
    """The request needs more tokens than one step has."""


class BlockOverflowError(ContextOverflowError):
    """No KV block is left. The error is not transient if the whole pool is too small."""


class TokenLimitClamped(ContextOverflowError):
    """Not a failure: the request will generate fewer tokens than it asked for."""


class MaxSequenceLengthOverflowError(ContextOverflowError):
    """The request is longer than any sequence may be. Never transient; `is_transient` is
    ignored."""

    def __init__(
        self, request_id: int | None, message: str | None = None, *, is_transient: bool = False
    ) -> None:
        super().__init__(request_id, message, is_transient=False)


class RemoteError(RolloutError):
    """An error of another process whose type is unknown here. `type_name` is the type's name
    there."""

    def __init__(self, type_name: str, message: str, *, is_transient: bool = False) -> None:
        super().__init__(type_name, message)
        self.type_name = type_name
        self.message = message
        self.is_transient = is_transient

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}"


def _subtree(error_type: type[RolloutError]) -> Iterator[type[RolloutError]]:
    """Yield `error_type` and all its subclasses."""
    yield error_type
    for subtype in error_type.__subclasses__():
        yield from _subtree(subtype)


# Built while only the classes above exist, so a peer's message can name no other type.
_ERROR_TYPES: Mapping[str, type[RolloutError]] = MappingProxyType(
    {error_type.__name__: error_type for error_type in _subtree(RolloutError)}
)


def utf8_text(text: str) -> str:
    """Return `text` with lone surrogates escaped, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def encode_error(error: BaseException, *, is_transient: bool = False) -> dict[str, Any]:
    """Return `error` as type name, message and transient flag, for messages between processes.
    `is_transient` is the flag for errors that are not RolloutErrors. A ContextOverflowError also
    keeps its `request_id`, and a RemoteError keeps its original type name."""
    encoded: dict[str, Any] = {
        "type": type(error).__name__,
        "message": str(error),
        "is_transient": error.is_transient if isinstance(error, RolloutError) else is_transient,
    }
    if isinstance(error, ContextOverflowError):
        encoded.update(message=error.message, request_id=error.request_id)
    elif isinstance(error, RemoteError):
        encoded.update(type=error.type_name, message=error.message)
    if encoded["message"] is not None:
        encoded["message"] = utf8_text(encoded["message"])
    return encoded


def decode_error(encoded: Mapping[str, Any]) -> RolloutError:
    """Return the error that `encode_error` encoded. An unknown type becomes a RemoteError. Raises
    ProtocolError if type, message or flag are missing."""
    try:
        type_name, message = encoded["type"], encoded["message"]
        is_transient = bool(encoded["is_transient"])
    except (KeyError, TypeError) as fault:
        raise ProtocolError(f"not an encoded error: {encoded!r}") from fault
    error_type = _ERROR_TYPES.get(type_name)
    if error_type is None or error_type is RemoteError:
        return RemoteError(type_name, message, is_transient=is_transient)
    if issubclass(error_type, ContextOverflowError):
        return error_type(encoded.get("request_id"), message, is_transient=is_transient)
    error = error_type(message)
    error.is_transient = is_transient or error.is_transient
    return error
