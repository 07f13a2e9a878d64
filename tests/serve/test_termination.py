"""SIGTERM with open streams: each ends or gets an error, and the process exits with 0."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.apis.fleets import directory
from tests.serve.raw_client import connected, read_all, request_bytes

pytestmark = pytest.mark.distributed

COMMAND = [sys.executable, "-m", "rollout", "serve", "--json", f"model={directory()}", "port=0"]
SETTINGS = ["num_threads=1", "max_sequence_length=512", "drain_timeout_s=0.2", "protocols=openai"]


def test_sigterm_answers_all_streams_and_exits_with_0() -> None:
    server = subprocess.Popen([*COMMAND, *SETTINGS], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        body = {"prompt": [1, 2], "max_tokens": 500, "ignore_eos": True, "stream": True}
        clients = [connected(address) for _ in range(50)]
        for client in clients:
            client.sendall(request_bytes("/v1/completions", body))
        for client in clients:
            assert client.recv(1).startswith(b"H")
        server.send_signal(signal.SIGTERM)
        start = time.monotonic()
        for client in clients:
            received = read_all(client)
            assert b'"finish_reason":"abort"' in received or b'"finish_reason":"length"' in received
            assert b"data: [DONE]" in received
            client.close()
        assert server.wait(60) == 0
        assert time.monotonic() - start < 60
    finally:
        server.kill()
        server.wait()
