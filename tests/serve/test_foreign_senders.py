"""Checks of Host, Origin and Content-Type: pages of other sites are refused, trainers are not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from rollout import ServeConfig
from rollout.serve.access import Access
from rollout.serve.app import routes_of
from rollout.serve.config import PROTOCOLS
from tests.serve.raw_client import connected, read_all
from tests.serve.served import Served, served_directory

pytestmark = pytest.mark.distributed

JSON = "Content-Type: application/json"
ALLOWED = "rollout.example"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = served_directory(ServeConfig(port=0, allowed_hosts=(ALLOWED,)))
    try:
        yield server
    finally:
        server.close()


def sent(
    served: Served, line: str, *headers: str, body: bytes | None = None, host: str = "localhost"
) -> tuple[int, str]:
    """Send a request whose headers are just these; returns the status and the error's message."""
    head = [f"{line} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
    if body is not None:
        head.append(f"Content-Length: {len(body)}")
    client = connected(("127.0.0.1", served.port))
    client.sendall("\r\n".join([*head, "", ""]).encode("latin-1") + (body or b""))
    answer = read_all(client)
    client.close()
    start, _, content = answer.partition(b"\r\n\r\n")
    status = int(start.split()[1])
    if status < 400:
        return status, ""
    error = json.loads(content)
    return status, error.get("message") or error["error"]["message"]


def guarded() -> list[tuple[str, str]]:
    """Method and path of every route that is not open to all."""
    return [
        (route.method, route.path.replace("{name:.+}", "model"))
        for route in routes_of(PROTOCOLS)
        if route.access is not Access.OPEN
    ]


def test_each_guarded_route_refuses_a_foreign_host_and_a_foreign_origin(served: Served) -> None:
    assert len(guarded()) > 40
    for method, path in guarded():
        body = b"{}" if method == "POST" else None
        status, message = sent(served, f"{method} {path}", JSON, body=body, host="evil.example")
        assert (status, "evil.example" in message) == (403, True), (method, path, message)
        assert "allowed_hosts" in message
        status, message = sent(
            served, f"{method} {path}", JSON, "Origin: http://evil.example", body=body
        )
        assert (status, "http://evil.example" in message) == (403, True), (method, path, message)
    assert served.get("/is_paused").json() == {"is_paused": False}


def test_each_route_with_an_effect_accepts_only_json(served: Served) -> None:
    for method, path in guarded():
        if method == "GET":
            continue
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; a=b"):
            for body in (b"{}", b""):
                status, message = sent(served, f"POST {path}", f"Content-Type: {kind}", body=body)
                assert status == 415, (path, kind, body, message)
                assert "Content-Type: application/json" in message
        assert sent(served, f"POST {path}", body=b"{}")[0] == 415, path
        assert sent(served, f"POST {path}", "Content-Type: a/b", body=b"{}")[0] == 415, path
    assert served.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1:1",
        "127.1.2.3",
        "[::1]:8000",
        ALLOWED,
        "localhost.",
    ],
)
def test_allowed_hosts_and_loopback_names_are_accepted(served: Served, host: str) -> None:
    assert sent(served, "GET /v1/models", host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "["]
)
def test_hosts_that_resemble_loopback_are_refused(served: Served, host: str) -> None:
    assert sent(served, "GET /v1/models", host=host)[0] == 403


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),  # the page of the server itself
        (f"https://{ALLOWED}", 200),
        ("http://localhost:3000", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_origin_must_be_this_server_or_an_allowed_host(
    served: Served, origin: str, status: int
) -> None:
    line = "POST /reset_prefix_cache"
    found, _ = sent(served, line, JSON, f"Origin: {origin}", body=b"{}", host="localhost:8000")
    assert found == status


def test_sec_fetch_site_is_checked_on_get_routes_with_an_effect(served: Served) -> None:
    cross = "Sec-Fetch-Site: cross-site"
    assert sent(served, "GET /flush_cache", cross)[0] == 403
    assert sent(served, "GET /flush_cache", "Sec-Fetch-Site: same-origin")[0] == 200
    assert sent(served, "GET /flush_cache")[0] == 200
    assert sent(served, "GET /v1/models", cross)[0] == 200


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ((), None),  # requests.post(url)
        (("Content-Length: 0",), None),
        (("Content-Type: application/octet-stream",), b""),  # aiohttp.ClientSession.post(url)
        ((JSON,), b""),
        ((JSON,), b"{}"),
        (("content-type: Application/JSON; charset=utf-8",), b"{}"),
        (("Content-Type: application/vnd.api+json",), b"{}"),
    ],
)
def test_content_types_of_trainers_are_accepted(
    served: Served, headers: tuple[str, ...], body: bytes | None
) -> None:
    assert sent(served, "POST /resume", *headers, body=body)[0] == 200


def test_routes_without_effect_accept_any_content_type(served: Served) -> None:
    for kind in ("text/plain", "application/json", "application/octet-stream"):
        assert sent(served, "GET /v1/models", f"Content-Type: {kind}")[0] == 200


def test_health_accepts_any_host(served: Served) -> None:
    assert sent(served, "GET /health", host="10.1.2.3:8000")[0] == 200
    assert sent(served, "GET /ping", host="balancer.example")[0] == 200


def test_off_loopback_any_host_is_accepted_without_allowed_hosts() -> None:
    fields = {"host": "0.0.0.0", "port": 0, "api_key": "a", "admin_key": "b"}
    for allowed, status in (((), 200), ((ALLOWED,), 403)):
        server = served_directory(ServeConfig(**fields, allowed_hosts=allowed))
        try:
            key = "Authorization: Bearer a"
            assert sent(server, "GET /v1/models", key, host="rollout:8000")[0] == status
            assert sent(server, "GET /v1/models", key, host=ALLOWED)[0] == 200
        finally:
            server.close()
