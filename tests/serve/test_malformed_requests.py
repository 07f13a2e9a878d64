"""Malformed HTTP requests: each gets a 4xx, and at most one line in the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from rollout import ServeConfig
from tests.serve.raw_client import connected, read_until, request_bytes
from tests.serve.served import Served, served_directory
from tests.serve.test_limits import STREAM, num_in_engines, until

pytestmark = pytest.mark.distributed

ADMIN, JSON = b"Authorization: Bearer master", b"Content-Type: application/json"
BODY = b'{"prompt": [1], "max_tokens": 1}'


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = served_directory(
        ServeConfig(port=0, api_key="sesame", admin_key="master", checkpoint_roots=("/tmp",))
    )
    try:
        yield server
    finally:
        server.close()


def path_body(name: str, path: str) -> bytes:
    return json.dumps({name: path}).encode()


ENCODINGS = (b"gzip", b"deflate", b"br", b"zstd")
CASES: list[tuple[bytes, tuple[bytes, ...], bytes, int]] = [
    (b"GET /v1/models", (b"Authorization: Bearer \xff",), b"", 401),
    (b"GET /v1/models", (b"Authorization: \xff\xfe",), b"", 401),
    (b"GET /v1/models", (b"Authorization: Bearer a\x00",), b"", 400),
    (b"GET /v1/models/%00", (ADMIN,), b"", 404),
    (b"GET /v1/models/%ff", (ADMIN,), b"", 404),
    (b"GET /v1/mod%00els", (ADMIN,), b"", 404),
    (b"GET /v1/models\xff", (ADMIN,), b"", 400),
    (b"GET /v1/models", (ADMIN, b"Origin: \xff"), b"", 403),
    (b"POST /pause?mode=%ff%00", (ADMIN,), b"", 400),
    (b"POST /wake_up?tags=%ff", (ADMIN,), b"", 400),
    (b"POST /v1/completions", (ADMIN, b"Content-Type: \xff"), BODY, 415),
    *(
        (b"POST /v1/completions", (ADMIN, JSON, b"Content-Encoding: " + e), BODY, 400)
        for e in ENCODINGS
    ),
    (b"POST /update_weights", (ADMIN, JSON), path_body("weight_dir", "/tmp/a\0b"), 400),
    (b"POST /update_weights", (ADMIN, JSON), path_body("weight_dir", "/tmp/" + "a" * 5000), 400),
    (b"POST /update_weights", (ADMIN, JSON), path_body("weight_dir", "/tmp/" + "a/" * 5000), 400),
    (b"POST /update_weights", (ADMIN, JSON), path_body("weight_dir", "\0"), 400),
    (b"POST /update_weights_from_disk", (ADMIN, JSON), path_body("model_path", "/tmp/\0"), 400),
    (b"POST /update_weights", (ADMIN, JSON), b'{"weight_dir": "/tmp/\\ud800"}', 400),
]


@pytest.mark.parametrize(("line", "headers", "body", "status"), CASES)
def test_a_malformed_request_is_refused_in_one_line(
    served: Served,
    caplog: pytest.LogCaptureFixture,
    line: bytes,
    headers: tuple[bytes, ...],
    body: bytes,
    status: int,
) -> None:
    caplog.set_level(logging.INFO)
    client = connected((served.host, served.port))
    length = b"Content-Length: %d" % len(body)
    head = [line + b" HTTP/1.1", b"Host: localhost", b"Connection: close", length, *headers]
    client.sendall(b"\r\n".join([*head, b"", b""]) + body)
    answer = read_until(client, b"never sent")
    client.close()
    assert answer.split()[1] == b"%d" % status, answer
    assert served.get("/health").status == 200
    records = [record for record in caplog.records if record.name.startswith("rollout.serve")]
    assert all(record.exc_info is None for record in records)
    assert len(caplog.text.splitlines()) <= 2  # aiohttp logs some twice


def test_a_disconnected_stream_is_one_line_of_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    num_cut = 20
    for _ in range(num_cut):
        client = connected((served.host, served.port))
        request = request_bytes("/v1/completions", STREAM)
        client.sendall(request.replace(b"Host:", b"Authorization: Bearer sesame\r\nHost:"))
        read_until(client, b"data:")
        client.close()
    until(lambda: num_in_engines(served) == 0, "the engines are idle")
    assert served.get("/health").status == 200
    records = [record for record in caplog.records if record.name.startswith("rollout.serve")]
    assert all(record.exc_info is None for record in records)
    assert len(caplog.text.splitlines()) <= num_cut
