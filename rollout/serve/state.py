"""ServerState: the objects that one server's handlers share. Route: a path and its handler.

`rollout.serve.server` makes the state. All route modules of rollout.serve define Routes, which
`rollout.serve.app` registers, and read the state as `request.app[STATE]`. `rollout.apis.serving`
imports ServerState.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rollout.serve.access import Access
from rollout.serve.config import ServeConfig
from rollout.serve.errors import ApiError, ErrorForm, openai_form
from rollout.serve.fields import Fields, NoFields
from rollout.serve.generation_config import SamplingDefaults
from rollout.serve.live_requests import LiveRequests, RequestLimiter, RequestMetrics
from rollout.serve.llm import ServedLLM
from rollout.serve.openai.chat_template import ChatTemplate
from rollout.serve.page.fleet import FleetFeed
from rollout.serve.page.recent import RecentSamples
from rollout.serve.page.running import RunningSamples
from rollout.serve.token_texts import TokenTexts
from rollout.tool_calls import ReplyFormat


class VersionLabels:
    """Labels that clients give to weights versions. The label of an unlabelled version is its
    number."""

    def __init__(self) -> None:
        self._labels: dict[int, str] = {}

    def set(self, version: int, label: str) -> None:
        self._labels[version] = label

    def of(self, version: int) -> str:
        return self._labels.get(version, str(version))

    def runs(self, spans: Iterable[tuple[int, int, int]]) -> list[dict[str, Any]]:
        """Return (start, end, version) spans as [{"version": label, "start": ..., "end": ...}].
        Neighbouring spans with the same label are merged."""
        runs: list[dict[str, Any]] = []
        for start, end, version in spans:
            label = self.of(version)
            if runs and runs[-1]["version"] == label:
                runs[-1]["end"] = end
            else:
                runs.append({"version": label, "start": start, "end": end})
        return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """The objects that the handlers of one server share.

    created: Unix time in seconds at which the server was made.
    max_model_len: most tokens of prompt and output together.
    sampling_defaults: sampling values for fields that clients of the openai protocol leave out.
    template: the chat template, or None if the model has none.
    reply_format: markup of the model's tool calls and thoughts.
    """

    llm: ServedLLM
    config: ServeConfig
    served_name: str
    created: int
    max_model_len: int
    labels: VersionLabels
    limiter: RequestLimiter
    live: LiveRequests
    texts: TokenTexts
    sampling_defaults: SamplingDefaults
    template: ChatTemplate | None
    reply_format: ReplyFormat
    metrics: RequestMetrics
    feed: FleetFeed
    recent: RecentSamples
    running: RunningSamples

    def require_model(self, name: str | None) -> None:
        """Raise ApiError (404) if `name` is given and is no name of the served model."""
        if name and name not in (self.served_name, self.llm.model_directory):
            raise ApiError(
                404,
                f"The model `{name}` does not exist; `{self.served_name}` is served.",
                param="model",
            )


STATE: web.AppKey[ServerState] = web.AppKey("state", ServerState)

# The second argument is the body as `Route.body`, or None if `Route.body` is None.
Handler = Callable[[web.Request, Any], Coroutine[Any, Any, web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A path of a protocol, its handler, and the checks before the handler is called.

    summary: what a request does, for GET /openapi.json.
    body: struct of the JSON body, or None if the body is not read. An empty body counts as {}.
    query: struct of the query's parameters, or None if the query is not checked.
    access: the kind of key that a request needs. Access.ADMIN marks an operation, which continues
        after its client disconnects.
    errors: function that makes the JSON body of an error.
    ends_with_client: whether an operation is cancelled when its client disconnects. Set for
        operations that wait for the client's broadcasts.
    generates: whether a request needs a slot of the RequestLimiter.
    """

    path: str
    handler: Handler
    summary: str = ""
    method: str = "POST"
    body: type[Fields] | None = None
    query: type[Fields] | None = None
    access: Access = Access.INFERENCE
    errors: ErrorForm = openai_form
    ends_with_client: bool = False
    generates: bool = False


def get_route(
    path: str,
    handler: Handler,
    summary: str,
    *,
    query: type[Fields] | None = None,
    access: Access = Access.INFERENCE,
    errors: ErrorForm = openai_form,
) -> Route:
    """Return the Route of a GET request."""
    return Route(
        method="GET",
        path=path,
        handler=handler,
        summary=summary,
        query=query,
        access=access,
        errors=errors,
    )


def admin_route(
    path: str,
    handler: Handler,
    summary: str,
    body: type[Fields] = NoFields,
    *,
    query: type[Fields] = NoFields,
    errors: ErrorForm = openai_form,
    ends_with_client: bool = False,
) -> Route:
    """Return the Route of an operation: a POST request that needs the admin key."""
    return Route(
        path=path,
        handler=handler,
        summary=summary,
        body=body,
        query=query,
        access=Access.ADMIN,
        errors=errors,
        ends_with_client=ends_with_client,
    )
