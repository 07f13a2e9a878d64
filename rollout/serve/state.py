"""ServerState: what handlers share, and Route: one entry of a protocol's table."""

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
from rollout.serve.limits import Access, Turnstile
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
    """created: seconds since 1970 at which the server started. max_model_len: most tokens of prompt
    and output. template: of chats, None without one. reply_format: of what the model answers.
    sampling_defaults: values of the fields that clients of the openai protocol leave out.
    """

    llm: ServedLLM
    config: ServeConfig
    served_name: str
    created: int
    max_model_len: int
    labels: VersionLabels
    turnstile: Turnstile
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

    body: the struct that the JSON body is decoded to; None: the body is not read.
    query: the parameters that the handler reads of the query; None: the query is not checked.
    access: routes of ADMIN are operations: a client that goes away does not stop them.
    ends_with_client: an operation that waits for its client's broadcasts ends with the client.
    generates: whether requests take a turn of the Turnstile.
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
