"""Checks of a request's sender: the keys of routes, and the headers of browsers.

Used by `rollout.serve.app` for each request. The route modules name the Access of their routes.
Nothing here changes after its construction.
"""

from __future__ import annotations

import enum
import hmac
from urllib.parse import urlsplit

from aiohttp import web

from rollout.serve.config import ServeConfig, is_loopback
from rollout.serve.errors import ApiError

# Content types that a page may send to any site without asking the site first.
_SIMPLE_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
_OTHER_SITES = ("cross-site", "same-site")  # of Sec-Fetch-Site; other ports are the same site


class Access(enum.Enum):
    """The key that a route needs: none, the inference key or the admin key."""

    OPEN = "open"
    INFERENCE = "inference"
    ADMIN = "admin"


class Keys:
    """The accepted keys of each kind of route. Without a configured key a route is open."""

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
            raise ApiError(
                401, f"the {access.value} key is missing or wrong; send Authorization: Bearer KEY"
            )


class Senders:
    """Refuses requests that a page of another site makes a browser send.

    A browser on the server's machine can reach loopback addresses, too. It names the page's site in
    the header Origin. It sends JSON to another site only if that site allows it, which this server
    never does. The header Host holds the host name of the request's URL. It exposes DNS rebinding,
    in which another site's name resolves to this server's address.

    Routes of Access.OPEN are not checked: they change nothing and return no samples.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._names = {name.lower() for name in (config.host, *config.allowed_hosts)}
        # Off loopback a key is required, which no page knows, and others choose the server's names.
        self._accepts_any_host = not is_loopback(config.host) and not config.allowed_hosts

    def check(self, request: web.Request, access: Access) -> None:
        """Raise ApiError: 403 if Host, Origin or Sec-Fetch-Site names another site, 415 for a body
        that is not declared as JSON.
        """
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
        """Return whether a page of `origin` was loaded from this server, or its host is allowed."""
        place = origin.partition("://")[2].lower()
        return bool(place) and (place == host.lower() or _name_of(place) in self._names)


def _encoded(key: str | None) -> bytes | None:
    return None if key is None else key.encode()


def _name_of(place: str) -> str:
    """Return the host of HOST or HOST:PORT, "" if it has none."""
    try:
        return (urlsplit(f"//{place}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _require_json(request: web.Request) -> None:
    """Raise ApiError for a body that is not declared as JSON. Without a body, only the content
    types that pages may send are refused, since some clients name a type and send no body."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    if request.body_exists or kind in _SIMPLE_TYPES:
        raise ApiError(
            415,
            f"Content-Type {kind:.80} is not accepted, only JSON; "
            "send the header Content-Type: application/json"
            if kind
            else "the body has no Content-Type; send the header Content-Type: application/json",
        )
