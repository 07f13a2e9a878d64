"""The web page at `/`: three static files, and a stream of server-sent events.

`rollout.serve.app` registers `page_routes`. `rollout.cli.serve` prints `example_request`. Browsers
and `rollout.cli.top` read the stream.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, suppress
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web

from rollout.serve.access import Access
from rollout.serve.errors import ApiError
from rollout.serve.page.recent import MAX_SAMPLES, shown_sample
from rollout.serve.state import STATE, Handler, Route, ServerState

RUNNING_INTERVAL_S = 0.25
_DEFAULT_NUM_SAMPLES = 100
_SAMPLES_PER_EVENT = 20
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
# The page loads nothing from other hosts, and a sample's text cannot run as a script.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_routes() -> list[Route]:
    """Return the routes of the page. Only /events needs the inference key."""
    static = [
        Route(method="GET", path=path, handler=_file(*found), access=Access.OPEN)
        for path, found in _FILES.items()
    ]
    return [*static, Route(method="GET", path="/events", handler=_events)]


def _file(name: str, content_type: str) -> Handler:
    content = files("rollout.serve.page").joinpath(name).read_bytes()
    headers = {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def answer(request: web.Request, body: Any) -> web.Response:
        return web.Response(
            body=content, content_type=content_type, charset="utf-8", headers=headers
        )

    return answer


async def _events(request: web.Request, body: Any) -> web.StreamResponse:
    """Send server-sent events to the page. A `fleet` event has the engines' counters, once a
    second. A `samples` event has newly finished samples. A `running` event has new tokens of
    running samples. The query's `samples` limits the samples with each `fleet` event. 0 sends no
    samples."""
    state = request.app[STATE]
    limit = _num_samples(request.query.get("samples", str(_DEFAULT_NUM_SAMPLES)))
    response = web.StreamResponse(headers={"Cache-Control": "no-store"})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    next_serial = 0
    running: asyncio.Task[None] | None = None
    try:
        await _send(state, response, "server", _about(state))
        if limit:
            running = asyncio.ensure_future(_send_running(state, response))
        async with aclosing(state.feed.snapshots()) as snapshots:
            async for snapshot in snapshots:
                await _send(state, response, "fleet", snapshot)
                samples = state.recent.since(next_serial, limit)
                for start in range(0, len(samples), _SAMPLES_PER_EVENT):
                    batch = samples[start : start + _SAMPLES_PER_EVENT]
                    shown = [shown_sample(sample, state.texts) for sample in batch]
                    await _send(state, response, "samples", shown)
                    await asyncio.sleep(0)  # serve other requests between two batches
                next_serial = state.recent.num_added
    except (ConnectionError, asyncio.TimeoutError):
        pass  # the client has disconnected, or reads nothing
    finally:
        if running is not None:
            running.cancel()
    return response


async def _send_running(state: ServerState, response: web.StreamResponse) -> None:
    """Send `running` events until the client disconnects. Each event has all followed samples, with
    the tokens that the client lacks."""
    num_sent: dict[int, int] = {}
    with state.running.page(), suppress(ConnectionError, asyncio.TimeoutError):
        while True:
            samples = state.running.samples()
            if samples or num_sent:
                shown = [each.shown(num_sent.get(each.serial), state.texts) for each in samples]
                num_sent = {each.serial: each.num_tokens for each in samples}
                await _send(state, response, "running", shown)
            await asyncio.sleep(RUNNING_INTERVAL_S)


def _about(state: ServerState) -> dict[str, Any]:
    """Return what the page shows about the server. "example" is a request to send, or None."""
    return {
        "model": state.served_name,
        "started": state.created,
        "needs_key": state.config.api_key is not None,
        "example": example_request(state),
    }


def example_request(state: ServerState) -> dict[str, str] | None:
    """Return the path and JSON body of a request that generates text, or token ids if there is no
    tokenizer. Return None if the server's protocols have no route that generates."""
    protocols, has_text = state.config.protocols, state.llm.tokenizer is not None
    prompt: str | list[int] = "Once upon a time" if has_text else [1, 2, 3]
    num_tokens = min(64, max(1, state.max_model_len // 4))
    if "openai" in protocols:
        own = {"model": state.served_name, "max_tokens": num_tokens}
        if has_text and state.template is not None:
            message = {"role": "user", "content": "Tell me a short story."}
            return _example("v1/chat/completions", {**own, "messages": [message]})
        return _example("v1/completions", {**own, "prompt": prompt})
    if "sglang" in protocols:
        given = {"text" if has_text else "input_ids": prompt}
        return _example("generate", {**given, "sampling_params": {"max_new_tokens": num_tokens}})
    return None


def _example(path: str, body: dict[str, Any]) -> dict[str, str]:
    return {"path": path, "body": json.dumps(body)}


def _num_samples(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > MAX_SAMPLES:
        raise ApiError(
            400, f"samples={text:.20} must be an integer in [0, {MAX_SAMPLES}]", param="samples"
        )
    return int(text)


async def _send(state: ServerState, response: web.StreamResponse, kind: str, content: Any) -> None:
    data = b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"
    await asyncio.wait_for(response.write(data), state.config.stalled_stream_timeout_s)
