"""A client over bare sockets, for requests that no HTTP library sends and for disconnects."""

from __future__ import annotations

import json
import socket
from typing import Any


def request_bytes(path: str, body: Any) -> bytes:
    """A POST with its body."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def connected(address: tuple[str, int], *, receive_bytes: int | None = None) -> socket.socket:
    """A connection; `receive_bytes` bounds what the system takes without being read."""
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(60)
    client.connect(address)
    return client


def read_all(client: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = b""
    while piece := client.recv(65536):
        received += piece
    return received


def read_until(client: socket.socket, end: bytes) -> bytes:
    """Everything up to `end`, or until the server closes."""
    received = b""
    while end not in received and (piece := client.recv(65536)):
        received += piece
    return received
