"""named_http_faults: turns aiohttp's errors into errors that `main` reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

from rollout.errors import RolloutError


@contextmanager
def named_http_faults(url: str) -> Iterator[None]:
    """Raise aiohttp's errors as RolloutError, except those that are OSErrors."""
    try:
        yield
    except aiohttp.ClientError as error:
        if isinstance(error, OSError):
            raise
        raise RolloutError(f"{url} did not answer like a server of models: {error}") from error
