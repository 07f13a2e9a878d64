"""How many requests an engine holds: those that it can run, and some that wait ahead of time."""

from __future__ import annotations


def num_ahead(max_requests: int) -> int:
    """Requests that wait at an engine which runs up to `max_requests`, so that a step that ends
    requests finds others there. All further ones wait in the coordinator, for any engine."""
    return max(8, max_requests // 8)
