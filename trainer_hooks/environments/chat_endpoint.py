"""ChatEndpoint: chat completions over HTTP on the loopback interface, for programs of agents."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from aiohttp import web

from trainer_hooks.environments.chat_session import ChatSession, ContextTooLongError

_MAX_BODY_BYTES = 64 << 20


class ChatEndpoint:
    """Serves POST /chat/completions of OpenAI's protocol below an address for each session.

        async with ChatEndpoint() as endpoint:
            with endpoint.serving(session) as base_url: ...

    Addresses hold a random word, and an address is gone when its block ends. A caller that hangs
    up cancels its turn.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, ChatSession] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    @contextlib.contextmanager
    def serving(self, session: ChatSession) -> Iterator[str]:
        """The base URL whose requests `session` answers."""
        key = secrets.token_urlsafe(16)
        self._sessions[key] = session
        try:
            yield f"http://127.0.0.1:{self._port}/{key}/v1"
        finally:
            del self._sessions[key]

    async def __aenter__(self) -> ChatEndpoint:
        """Listen."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/{key}/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        session = self._sessions.get(request.match_info["key"])
        if session is None:
            return _error(404, "this rollout has ended", "not_found")
        try:
            return web.json_response(await session.complete(await request.json()))
        except ContextTooLongError as error:
            return _error(400, str(error), "context_length_exceeded")
        except Exception as error:  # a body that is no JSON, or what the session keeps as its fault
            return _error(400, repr(error), "rollout_failed")


def _error(status: int, message: str, code: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "code": code, "param": None}
    return web.json_response({"error": error}, status=status)
