"""Limits of ServeConfig, misbehaving clients, and shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from rollout import ServeConfig
from tests.serve.raw_client import connected, read_all, read_until, request_bytes
from tests.serve.served import Served, served_directory
from tests.tiny_models import prompt_of
from tests.waiting import until

pytestmark = pytest.mark.distributed

PATH = "/v1/completions"
# Runs for seconds, which a busy machine may take from this process: what must not end by itself is
# sent to engines that are paused.
LONG = {"prompt": prompt_of(4), "max_tokens": 500, "ignore_eos": True, "n": 8}
STREAM = LONG | {"stream": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = served_directory(
        ServeConfig(
            port=0,
            max_body_bytes=50_000,
            max_running_requests=2,
            max_waiting_requests=1,
            body_timeout_s=0.3,
            keepalive_timeout_s=0.5,
            stalled_stream_timeout_s=0.5,
        )
    )
    try:
        yield server
    finally:
        server.close()


def num_in_engines(served: Served) -> int:
    stats = served.do(served.llm.stats())
    return stats.num_running + stats.num_waiting + stats.num_paused


def begin(served: Served, body: Any, receive_bytes: int | None = None) -> Any:
    """Send a request to engines that are paused, and wait until they have it."""
    before = num_in_engines(served)
    client = connected((served.host, served.port), receive_bytes=receive_bytes)
    client.sendall(request_bytes(PATH, body))
    until(lambda: num_in_engines(served) > before, "the engines have the request")
    return client


@contextmanager
def paused(served: Served) -> Iterator[None]:
    served.do(served.llm.pause())
    try:
        yield
    finally:
        served.do(served.llm.unpause())


@pytest.mark.parametrize("body", [LONG, STREAM])
def test_a_client_that_disconnects_aborts_its_requests(
    served: Served, body: dict[str, Any]
) -> None:
    with paused(served):
        client = begin(served, body)
    client.close()
    until(lambda: num_in_engines(served) == 0, "the engines are idle")
    assert not served.llm.has_unfinished()


def test_max_waiting_requests_answers_429_with_retry_after(served: Served) -> None:
    with paused(served):
        clients = [begin(served, STREAM) for _ in range(2)]
        waiting = connected((served.host, served.port))
        waiting.sendall(request_bytes(PATH, LONG | {"max_tokens": 1}))
        until(lambda: b"requests_waiting 1.0" in served.get("/metrics").body, "one waits")
        refused = served.post(PATH, {"prompt": [1]})
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["type"] == "RateLimitError"
        assert served.get("/health").status == 200
        for client in clients:
            client.close()
    assert waiting.recv(100).startswith(b"HTTP/1.1 200")
    waiting.close()
    until(lambda: num_in_engines(served) == 0, "the engines are idle")


def test_max_body_bytes_and_body_timeout_s(served: Served) -> None:
    answer = served.call("POST", PATH, b" " * 60_000)
    assert (answer.status, answer.json()["error"]["code"]) == (413, 413)
    client = connected((served.host, served.port))
    client.sendall(request_bytes(PATH, LONG)[:-5])
    assert client.recv(100).startswith(b"HTTP/1.1 408")
    client.close()


def test_keepalive_timeout_s_closes_slow_headers(served: Served) -> None:
    client = connected((served.host, served.port))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
    assert b"200" not in read_all(client)
    client.close()


def test_stalled_stream_timeout_s_disconnects_a_client(served: Served) -> None:
    body = STREAM | {"n": 64, "logprobs": 200, "return_tokens_as_token_ids": True}
    with paused(served):
        client = begin(served, body, receive_bytes=4096)
    until(lambda: num_in_engines(served) == 0, "it ends")
    until(lambda: b"requests_running 0.0" in served.get("/metrics").body, "it is cut off")
    received = b""
    with suppress(ConnectionError):
        received = read_all(client)
    assert b"[DONE]" not in received
    client.close()


NO_BODIES = [b"{", b"[1]", b'{"prompt": "\xff"}', b"\x00", b"[" * 9999, b" " * 60_000]
BAD = [(path, body) for path in (PATH, "/generate", "/pause_generation") for body in NO_BODIES]
BAD += [
    (PATH, b'{"prompt": [1], "n": 1000000000000000000000000000000}'),
    (PATH, b'{"prompt": [1], "model": "another"}'),
    ("/generate", b'{"input_ids": [1], "sampling_params": {"n": 1e300}}'),
    ("/v1/chat/completions", b'{"messages": "hello"}'),
    ("/inference/v1/generate", b'{"token_ids": [[1]]}'),
    ("/update_weights", b'{"weight_dir": 3}'),
]


def test_bad_requests_get_json_errors_and_others_continue(served: Served) -> None:
    others: list[bytes] = []
    client = begin(served, STREAM | {"n": 1})
    reader = threading.Thread(target=lambda: others.append(read_until(client, b"data: [DONE]")))
    reader.start()
    for path, body in BAD:
        answer = served.call("POST", path, body)
        assert answer.status in (400, 404, 413), (path, body[:40], answer.body)
        assert answer.headers["Content-Type"].startswith("application/json")
        assert set(answer.json()) <= {"error", "success", "message"}
    reader.join()
    assert b'"finish_reason":"length"' in others[0]
    client.close()


def test_drain_timeout_s_aborts_and_answers_requests() -> None:
    served = served_directory()
    try:
        assert served.post(PATH, {"prompt": [1], "max_tokens": 2}).status == 200
        served.do(served.llm.pause())
        clients = [begin(served, body) for body in (STREAM, LONG)]
        served.do(served.llm.stop_serving(drain_timeout_s=0.0))
        stream, whole = map(read_all, clients)
        assert b'"finish_reason":"abort"' in stream
        assert b"data: [DONE]" in stream
        reply = json.loads(whole.partition(b"\r\n\r\n")[2])
        assert {choice["finish_reason"] for choice in reply["choices"]} == {"abort"}
        until(lambda: num_in_engines(served) == 0, "the engines are idle")
        assert not served.llm.has_unfinished()
    finally:
        served.close()


def test_cut_streams_leave_no_request() -> None:
    served = served_directory()
    try:
        served.post(PATH, {"prompt": [1], "max_tokens": 1})
        time.sleep(0.2)

        async def num_tasks() -> int:
            return len(asyncio.all_tasks())

        def num_open() -> int:
            return len(os.listdir("/proc/self/fd"))

        tasks, descriptors = served.do(num_tasks()), num_open()
        complete: list[int] = []

        def one(index: int) -> None:
            body = {"prompt": prompt_of(3, index), "max_tokens": 12, "stream": True, "seed": index}
            client = connected((served.host, served.port))
            client.sendall(
                request_bytes(PATH, body).replace(
                    b"Host: localhost", b"Host: localhost\r\nConnection: close"
                )
            )
            if index % 10 == 0:
                client.recv(10)
            elif b"data: [DONE]" in read_all(client):
                complete.append(index)
            client.close()

        threads = [threading.Thread(target=one, args=(index,)) for index in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(complete) == 180
        until(lambda: num_in_engines(served) == 0, "the engines are idle")
        assert not served.llm.has_unfinished()
        until(lambda: served.do(num_tasks()) <= tasks, "all tasks have ended")
        until(lambda: num_open() <= descriptors, "all descriptors are closed")
    finally:
        served.close()
