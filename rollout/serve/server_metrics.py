"""ServerMetrics: counters and times of answered requests."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram


class ServerMetrics:
    """Counters and times of answered requests, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "rollout_http_requests",
            "Answered requests",
            ("method", "path", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "rollout_http_request_seconds",
            "Time from a request to the end of its answer",
            ("path",),
            registry=self.registry,
            buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
        )

    def add(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count a request. path: the path of its route."""
        self._requests.labels(method, path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)
