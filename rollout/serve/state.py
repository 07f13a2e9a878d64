"""ServerState: the objects that handlers share. Route: a path, its handler and its checks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rollout.serve.config import ServeConfig
from rollout.serve.errors import ErrorForm, openai_form
from rollout.serve.fields import Fields, NoFields
from rollout.serve.generation_config import SamplingDefaults
from rollout.serve.labels import VersionLabels
from rollout.serve.limits import Access, RequestLimiter
from rollout.serve.live_requests import LiveRequests
from rollout.serve.llm import ServedLLM
from rollout.serve.openai.chat_template import ChatTemplate
from rollout.serve.page.feed import FleetFeed
from rollout.serve.page.recent import RecentSamples
from rollout.serve.server_metrics import ServerMetrics
from rollout.serve.tag_tokenizers import TagTokenizers
from rollout.serve.token_texts import TokenTexts
from rollout.tool_calls import ReplyFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """The objects that the handlers of one server share.

    created: when the server started, in seconds since 1970. max_model_len: most tokens of prompt
    and output. template: the chat template, None without one. reply_format: how the model writes
    tool calls and thoughts.
    sampling_defaults: values of the fields that clients of the openai protocol leave out.
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
    tag_tokenizers: TagTokenizers
    sampling_defaults: SamplingDefaults
    template: ChatTemplate | None
    reply_format: ReplyFormat
    metrics: ServerMetrics
    feed: FleetFeed
    recent: RecentSamples


STATE: web.AppKey[ServerState] = web.AppKey("state", ServerState)

# A handler gets its request and the decoded body: the Route's struct, None if it has none.
Handler = Callable[[web.Request, Any], Coroutine[Any, Any, web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A path of a protocol. An absent body is an empty object.

    body: struct of the JSON body; None: the body is not read.
    query: struct of the query's parameters; None: the query is not checked.
    access: key that is needed. Routes of ADMIN are operations, which go on without their client.
    ends_with_client: whether an operation ends with its client, for whose broadcasts it waits.
    generates: whether requests need a place of the RequestLimiter.
    """

    method: str
    path: str
    handler: Handler
    body: type[Fields] | None = None
    query: type[Fields] | None = None
    access: Access = Access.INFERENCE
    errors: ErrorForm = openai_form
    ends_with_client: bool = False
    generates: bool = False
    summary: str = ""


def get_route(
    path: str,
    handler: Handler,
    summary: str,
    *,
    query: type[Fields] | None = None,
    access: Access = Access.INFERENCE,
    errors: ErrorForm = openai_form,
) -> Route:
    """Return the route of a question, which changes nothing."""
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
    *,
    body: type[Fields] = NoFields,
    query: type[Fields] = NoFields,
    errors: ErrorForm = openai_form,
    ends_with_client: bool = False,
) -> Route:
    """Return the route of an operation."""
    return Route(
        method="POST",
        path=path,
        handler=handler,
        summary=summary,
        body=body,
        query=query,
        access=Access.ADMIN,
        errors=errors,
        ends_with_client=ends_with_client,
    )
