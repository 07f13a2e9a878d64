"""named_http_faults: turns aiohttp's errors into errors that `main` reports.

Used by `rollout top` and `rollout bench serving`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

from rollout.errors import RolloutError


@contextmanager
def named_http_faults(url: str) -> Iterator[None]:
    """Turn aiohttp's errors into RolloutError. An error that is an OSError passes unchanged."""
    try:
        yield
    except aiohttp.ClientError as error:
        if isinstance(error, OSError):
            raise
        raise RolloutError(f"{url} did not answer like a server of models: {error}") from error
