"""Senders: refuses requests that a page of another site makes a browser send.

A browser on the server's machine reaches loopback, too. It names the site of the page in Origin,
sends JSON to another site only if that site allows it, which this server never does, and puts the
name under which it has found the server into Host, whatever address that name leads to now.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from aiohttp import web

from rollout.serve.config import ServeConfig, is_loopback
from rollout.serve.errors import ApiError
from rollout.serve.limits import Access

# Content types that pages may send to any site without asking it.
_SIMPLE_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
_OTHER_SITES = ("cross-site", "same-site")  # of Sec-Fetch-Site; other ports are the same site


class Senders:
    """Checks Host, Origin and Content-Type, except on routes of Access.OPEN, which have no effect
    and show no samples.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._names = {name.lower() for name in (config.host, *config.allowed_hosts)}
        # Off loopback keys are required, which no page knows; the names are for others to choose.
        self._takes_all_names = not is_loopback(config.host) and not config.allowed_hosts

    def check(self, request: web.Request, access: Access) -> None:
        """Raise ApiError, naming the header and the remedy: 403 for a foreign Host or Origin, 415
        for what is not JSON.
        """
        if access is Access.OPEN:
            return
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if host and not self._is_ours(host):
            raise ApiError(
                403, f"Host: {host:.80} is not a name of this server; add it to allowed_hosts"
            )
        if origin is not None and not self._is_same(origin, host):
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

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        return self._takes_all_names or name in self._names or is_loopback(name)

    def _is_same(self, origin: str, host: str) -> bool:
        """Return whether a page of `origin` was loaded from this server, or its host is allowed."""
        place = origin.partition("://")[2].lower()
        return bool(place) and (place == host.lower() or _name_of(place) in self._names)


def _name_of(place: str) -> str:
    """Return the host of HOST or HOST:PORT, "" if it has none."""
    try:
        return (urlsplit(f"//{place}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _require_json(request: web.Request) -> None:
    """Raise ApiError for a body that is not declared as JSON. Some clients name a type without
    sending a body: then only types that pages may send are refused."""
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
