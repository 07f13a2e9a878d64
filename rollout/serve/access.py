"""Checks a request's sender: its API key, and the headers that browsers set.

`rollout.serve.app` checks each request. `rollout.serve.state`, `rollout.serve.health`,
`rollout.serve.openapi` and `rollout.serve.page.routes` use Access for routes.
"""

from __future__ import annotations

import enum
import hmac
from urllib.parse import urlsplit

from aiohttp import web

from rollout.serve.config import ServeConfig, is_loopback
from rollout.serve.errors import ApiError

# Browsers send bodies of these content types to any site without a CORS preflight.
_SIMPLE_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
# Values of the header Sec-Fetch-Site. A page of another port of this host is "same-site".
_OTHER_SITES = ("cross-site", "same-site")


class Access(enum.Enum):
    """The key that a route needs: none, the inference key or the admin key."""

    OPEN = "open"
    INFERENCE = "inference"
    ADMIN = "admin"


class Keys:
    """The accepted keys for each Access. A route is open if no key is configured for its Access."""

    def __init__(self, config: ServeConfig) -> None:
        api, admin = (_encoded(key) for key in (config.api_key, config.admin_key))
        self._accepted = {
            Access.OPEN: (),
            Access.INFERENCE: () if api is None else tuple(key for key in (api, admin) if key),
            Access.ADMIN: () if admin is None else (admin,),
        }

    def check(self, authorization: str | None, access: Access) -> None:
        """Raise ApiError (401) unless the Authorization header has a key that `access` accepts."""
        accepted = self._accepted[access]
        if not accepted:
            return
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        given = token.encode(errors="surrogateescape")  # as aiohttp decodes headers
        # Compare all keys: constant time.
        if not any([hmac.compare_digest(given, key) for key in accepted]):
            raise ApiError(
                401, f"the {access.value} key is missing or wrong; send Authorization: Bearer KEY"
            )


class Senders:
    """Refuses requests that a web page of another site makes a browser send.

    The header Origin names the page's site. A browser sends JSON to another site only after a CORS
    preflight, which this server never grants. The header Host reveals DNS rebinding, where another
    site's name resolves to this server's address.

    Routes of Access.OPEN are not checked, because they change nothing and return no samples."""

    def __init__(self, config: ServeConfig) -> None:
        self._names = {name.lower() for name in (config.host, *config.allowed_hosts)}
        # Off loopback a key is required, which no page knows.
        self._accepts_any_host = not is_loopback(config.host) and not config.allowed_hosts

    def check(self, request: web.Request, access: Access) -> None:
        """Raise ApiError with 403 if Host, Origin or Sec-Fetch-Site names another site. Raises
        ApiError with 415 for a body that is not declared as JSON."""
        if access is Access.OPEN:
            return
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if host and not self._is_own_host(host):
            raise ApiError(
                403, f"Host: {host:.80} is not a name of this server; add it to allowed_hosts"
            )
        if origin is not None and not self._is_own_origin(origin, host):
            raise ApiError(
                403,
                f"Origin: {origin:.80} is another site; add its host to allowed_hosts if its pages "
                "may use this server",
            )
        is_effect = request.method not in ("GET", "HEAD") or access is Access.ADMIN
        if is_effect and origin is None and request.headers.get("Sec-Fetch-Site") in _OTHER_SITES:
            raise ApiError(403, "a page of another site may not use this server")
        if request.method not in ("GET", "HEAD"):
            _require_json(request)

    def _is_own_host(self, host: str) -> bool:
        name = _name_of(host)
        return self._accepts_any_host or name in self._names or is_loopback(name)

    def _is_own_origin(self, origin: str, host: str) -> bool:
        """Return whether `origin` is this server or one of its allowed hosts."""
        place = origin.partition("://")[2].lower()
        return bool(place) and (place == host.lower() or _name_of(place) in self._names)


def _encoded(key: str | None) -> bytes | None:
    return None if key is None else key.encode()


def _name_of(place: str) -> str:
    try:
        return (urlsplit(f"//{place}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _require_json(request: web.Request) -> None:
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    # Some clients send another content type without a body.
    if request.body_exists or kind in _SIMPLE_TYPES:
        raise ApiError(
            415,
            f"Content-Type {kind:.80} is not accepted, only JSON; "
            "send the header Content-Type: application/json"
            if kind
            else "the body has no Content-Type; send the header Content-Type: application/json",
        )
