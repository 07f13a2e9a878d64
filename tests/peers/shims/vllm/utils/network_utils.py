"""Free ports of loopback."""

from __future__ import annotations

import socket

from vllm import absent_names


def get_open_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


__getattr__ = absent_names(__name__)
