"""ChatEndpoint: serves chat completions over HTTP on 127.0.0.1, for agents in other processes.

Used by `trainer_hooks.environments.verifiers_v1`. A ChatEndpoint listens on a TCP port.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from rollout.extras import extra_needed
from trainer_hooks.environments.chat_session import ChatSession, ContextTooLongError

with extra_needed("serve", "ChatEndpoint"):
    from aiohttp import web

_MAX_BODY_BYTES = 64 << 20


class ChatEndpoint:
    """Serves POST /chat/completions of OpenAI's protocol, with a separate URL for each session.

        async with ChatEndpoint() as endpoint:
            with endpoint.serving(session) as base_url: ...

    URLs contain a random key and become invalid when their block ends. A caller that disconnects
    cancels its turn.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, ChatSession] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    @contextlib.contextmanager
    def serving(self, session: ChatSession) -> Iterator[str]:
        """Yield the base URL whose requests `session` answers during the block."""
        key = secrets.token_urlsafe(16)
        self._sessions[key] = session
        try:
            yield f"http://127.0.0.1:{self._port}/{key}/v1"
        finally:
            del self._sessions[key]

    async def __aenter__(self) -> ChatEndpoint:
        """Listen on a free port of 127.0.0.1."""
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
        except Exception as error:  # a body that is not JSON, or the session's own fault
            return _error(400, repr(error), "rollout_failed")


def _error(status: int, message: str, code: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "code": code, "param": None}
    return web.json_response({"error": error}, status=status)
