"""A proxy that writes what a client sends, and how it was answered, to tests/serve/recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.loopback_server import serving

RECORDED = Path(__file__).resolve().parents[1] / "serve" / "recorded"
HEADERS = ("Authorization", "Content-Type", "X-Session-ID")
# Of two requests that differ in these alone, one is enough.
_ARBITRARY = ("seed", "request_id", "rid")
_GENERATION = ("/v1/", "/inference/", "/generate", "/tokenize", "/detokenize")


@contextmanager
def recording(name: str, url: str, root: str) -> Iterator[str]:
    """Yield the URL of a proxy of the server at `url`. At a regular end NAME.json is written, in
    which "{root}" stands for the directory that both sides see.
    """
    exchanges: list[dict[str, Any]] = []
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", _Proxy(url, exchanges).handle)
    with serving(app) as proxy:
        yield proxy
    lines = ",\n".join(json.dumps(each) for each in _distinct(exchanges))
    RECORDED.mkdir(exist_ok=True)
    text = f"[\n{lines}\n]\n".replace(root, "{root}")
    (RECORDED / f"{name}.json").write_text(text, encoding="utf-8")


class _Proxy:
    """Hands requests on, and lists them in the order in which they came."""

    def __init__(self, url: str, exchanges: list[dict[str, Any]]) -> None:
        self._url, self._exchanges = url, exchanges

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        exchange: dict[str, Any] = {"method": request.method, "path": request.path_qs}
        kept = {name: request.headers[name] for name in HEADERS if name in request.headers}
        exchange |= {"headers": kept, "body": json.loads(body) if body else None}
        self._exchanges.append(exchange)
        sent = {name: text for name, text in request.headers.items() if name not in _HOP_HEADERS}
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(
                request.method, self._url + request.path_qs, headers=sent, data=body or None
            ) as answer,
        ):
            exchange["status"] = answer.status
            received = {n: text for n, text in answer.headers.items() if n not in _HOP_HEADERS}
            reply = web.StreamResponse(status=answer.status, headers=received)
            with suppress(ConnectionResetError):  # the client has left its stream
                await reply.prepare(request)
                async for chunk in answer.content.iter_any():
                    await reply.write(chunk)
                await reply.write_eof()
        return reply


_HOP_HEADERS = ("Host", "Connection", "Keep-Alive", "Transfer-Encoding")


def _distinct(exchanges: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without repeated generation. Verbs of control stay: they depend on their order."""
    kept, known = [], set()
    for exchange in exchanges:
        parts = [exchange["method"], exchange["path"], _without_arbitrary(exchange["body"])]
        text = json.dumps([*parts, exchange["status"]], sort_keys=True)
        if not exchange["path"].startswith(_GENERATION) or text not in known:
            kept.append(exchange)
        known.add(text)
    return kept


def _without_arbitrary(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    return {
        name: _without_arbitrary(value) for name, value in body.items() if name not in _ARBITRARY
    }
