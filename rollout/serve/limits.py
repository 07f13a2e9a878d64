"""Keys of clients, and the limit of requests that run at once."""

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
    """The key that a route needs: none, the inference key or the admin key."""

    OPEN = "open"
    INFERENCE = "inference"
    ADMIN = "admin"


class Keys:
    """The keys of a server. A route without a key set is open."""

    def __init__(self, config: ServeConfig) -> None:
        api, admin = (_encoded(key) for key in (config.api_key, config.admin_key))
        self._accepted = {
            Access.OPEN: (),
            Access.INFERENCE: () if api is None else tuple(key for key in (api, admin) if key),
            Access.ADMIN: () if admin is None else (admin,),
        }

    def check(self, authorization: str | None, access: Access) -> None:
        """Raise ApiError unless an Authorization header holds a key for routes of `access`."""
        accepted = self._accepted[access]
        if not accepted:
            return
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        given = token.encode(errors="surrogateescape")  # as aiohttp decodes headers
        # Compare all keys: constant time.
        if not any([hmac.compare_digest(given, key) for key in accepted]):
            raise ApiError(401, f"this needs the {access.value} key: Authorization: Bearer KEY")


def _encoded(key: str | None) -> bytes | None:
    return None if key is None else key.encode()


class RequestLimiter:
    """Limits the requests that generate at once and the requests that wait. It can be closed for
    new ones.

    num_running, num_waiting: requests that hold a place now, and that wait for one.
    """

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self.num_running = self.num_waiting = 0
        self._free, self._max_waiting = asyncio.Semaphore(max_running), max_waiting
        self._reasons: dict[str, str] = {}  # why it is closed, by the name that closed it
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def close(self, who: str, message: str) -> None:
        """Answer new requests with 503 and `message` until `open` is called with the same name."""
        self._reasons[who] = message

    def open(self, who: str) -> None:
        """Undo `close` of the same name. Does nothing without one."""
        self._reasons.pop(who, None)

    async def is_idle_within(self, seconds: float) -> bool:
        """Wait until no request runs or waits. Returns whether that is so within `seconds`."""
        if self._is_idle.is_set():
            return True
        try:
            await asyncio.wait_for(self._is_idle.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a place, once one is free. Raises ApiError: 503 while closed, 429 if too many
        requests wait."""
        for message in self._reasons.values():
            raise ApiError(503, message, retry_after_s=_RETRY_AFTER_S)
        if self._free.locked() and self.num_waiting >= self._max_waiting:
            raise ApiError(
                429,
                f"{self.num_running} requests run and {self.num_waiting} wait; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.num_waiting += 1
        self._is_idle.clear()
        is_running = False
        try:
            await self._free.acquire()
            self.num_waiting -= 1
            self.num_running += 1
            is_running = True
            yield
        finally:
            if is_running:
                self.num_running -= 1
                self._free.release()
            else:
                self.num_waiting -= 1
            if not (self.num_running or self.num_waiting):
                self._is_idle.set()
