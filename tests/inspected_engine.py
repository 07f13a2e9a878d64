"""Engines of tests: one that shows two of its parts, and ways to change the backend of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rollout import DynamicInferenceEngine
from rollout.backends.base import Backend
from rollout.backends.select import create_backend
from rollout.scheduling.scheduler import Scheduler
from rollout.worker.worker import Worker

ChangeBackend = Callable[[Backend], Backend]


class InspectedEngine(DynamicInferenceEngine):
    """An engine whose scheduler, executor and KV cache a test can read and wrap."""

    def __init__(self, *, scheduler: Scheduler, executor: Worker, **parts: Any) -> None:
        super().__init__(scheduler=scheduler, executor=executor, **parts)
        self.scheduler, self.executor, self.kv = scheduler, executor, executor.kv


@contextmanager
def changed_backends(change: ChangeBackend) -> Iterator[None]:
    """Engines that are built meanwhile use the backend that `change` returns for theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "rollout.worker.loading.create_backend",
            lambda config, *ranks: change(create_backend(config, *ranks)),
        )
        yield


def running_ahead(backend: Backend) -> Backend:
    """Prepare a step while the one before runs, as on a GPU."""
    backend.executor.overlaps = True
    return backend
