"""Reads a server's URL, and turns aiohttp's errors into a RolloutError that names the URL.

Used by `rollout.cli.top` and `rollout.cli.bench_serving`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

from rollout.errors import RolloutError


def server_root(url: str) -> str:
    """Return the URL of a server's root, with a slash at its end. A final /v1 in `url`, which
    OpenAI's clients need, is dropped."""
    return url.rstrip("/").removesuffix("/v1") + "/"


@contextmanager
def named_http_faults(url: str) -> Iterator[None]:
    """Turn aiohttp's errors in the `with` block into RolloutErrors that name `url`. An aiohttp
    error that is also an OSError passes unchanged, unless it is a failed connection."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise RolloutError(
            f"no server answers at {url} ({_reason(error.os_error)}); start one with `rollout "
            "serve DIR`, or correct the address"
        ) from error
    except aiohttp.ClientError as error:
        if isinstance(error, OSError):
            raise
        raise RolloutError(f"{url} did not answer like a server of models: {error}") from error


def _reason(error: OSError) -> str:
    # asyncio's own text repeats the address.
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
