"""Who may call, and how many at once."""

from __future__ import annotations

import asyncio
import enum
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout.serve.config import ServeConfig
from rollout.serve.errors import ApiError

_RETRY_AFTER_S = 1


class Access(enum.Enum):
    """What a route needs: no key, the inference key, or the admin key."""

    OPEN = "open"
    INFERENCE = "inference"
    ADMIN = "admin"


class Keys:
    """The keys of a server. A route for which no key is set is open."""

    def __init__(self, config: ServeConfig) -> None:
        api, admin = (_encoded(key) for key in (config.api_key, config.admin_key))
        self._accepted = {
            Access.OPEN: (),
            Access.INFERENCE: () if api is None else tuple(key for key in (api, admin) if key),
            Access.ADMIN: () if admin is None else (admin,),
        }

    def check(self, authorization: str | None, access: Access) -> None:
        """Raise ApiError unless the value of an Authorization header opens routes of `access`."""
        accepted = self._accepted[access]
        if not accepted:
            return
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        given = token.encode(errors="surrogateescape")  # as aiohttp decodes headers
        # Every key is compared, so that the time tells nothing.
        if not any([hmac.compare_digest(given, key) for key in accepted]):
            raise ApiError(401, f"this needs the {access.value} key: Authorization: Bearer KEY")


def _encoded(key: str | None) -> bytes | None:
    return None if key is None else key.encode()


class Turnstile:
    """Lets so many requests generate at once, and so many more wait. It may be closed for new
    ones. num_running, num_waiting: how many do now.
    """

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self.num_running = self.num_waiting = 0
        self._free, self._max_waiting = asyncio.Semaphore(max_running), max_waiting
        self._reasons: dict[str, str] = {}  # why it is closed, by who closed it

    def close(self, who: str, message: str) -> None:
        """Answer new requests with 503 and `message`, until `who` opens again."""
        self._reasons[who] = message

    def open(self, who: str) -> None:
        """Undo the `close` of `who`; does nothing if there was none."""
        self._reasons.pop(who, None)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold a place, once one is free. Raises ApiError: 503 while closed, 429 if too many
        wait."""
        for message in self._reasons.values():
            raise ApiError(503, message, retry_after_s=_RETRY_AFTER_S)
        if self._free.locked() and self.num_waiting >= self._max_waiting:
            raise ApiError(
                429,
                f"{self.num_running} requests run and {self.num_waiting} wait; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._free.release()
