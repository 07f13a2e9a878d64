"""Backends that fail: memory once at a chosen point, or steps on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollout import DynamicInferenceEngine
from rollout.backends.base import Backend
from rollout.models.checkpoints.loading import build_model
from rollout.worker import kv_cache as cache
from tests.tiny_models import pool_gb, tiny_engine


class InjectedFault(RuntimeError):
    """Raised by an injected fault."""


class Fuse:
    """Raises once at the armed point. `passed` has the points that calls went through."""

    def __init__(self) -> None:
        self.armed: str | None = None
        self.passed: set[str] = set()

    def check(self, point: str) -> None:
        self.passed.add(point)
        if self.armed == point:
            self.armed = None
            raise InjectedFault(point)

    def around(self, point: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function so that it can fail before or after its work."""

        def call(*args: Any) -> Any:
            self.check(point)
            result = function(*args)
            self.check(f"{point}, done")
            return result

        return call


class Wrapped:
    """Delegates to `part`, except for the functions in `replaced`."""

    def __init__(self, part: Any, **replaced: Callable[..., Any]) -> None:
        self._part = part
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


KV_POINTS = tuple(
    f"kv {name}{done}"
    for name in ("release", "restore", "reserve", "copy")
    for done in ("", ", done")
)
WEIGHT_POINTS = tuple(
    f"weights {name}{done}"
    for name in ("release", "restore", "reserve", "refresh", "release_packed")
    for done in ("", ", done")
)


def engine_with_fuse(
    model: Any, num_blocks: int, **config: Any
) -> tuple[DynamicInferenceEngine, Fuse]:
    """An engine with a fuse in everything that a suspend or a resume calls."""
    fuse, causal_lm = Fuse(), build_model(model)
    for name in ("refresh", "release_packed"):
        setattr(causal_lm, name, fuse.around(f"weights {name}", getattr(causal_lm, name)))

    def by_resource(memory: Any, name: str) -> Callable[[str], Any]:
        def call(buffer: str) -> Any:
            resource = "weights" if buffer == "weights" else "kv"
            return fuse.around(f"{resource} {name}", getattr(memory, name))(buffer)

        return call

    def change(backend: Backend) -> Backend:
        resources, memory = iter(("weights", "kv")), backend.memory

        def create_arena() -> Any:
            arena = backend.create_host_arena()
            if (resource := next(resources, None)) is None:
                return arena  # for the packed copies of an update
            return Wrapped(arena, reserve=fuse.around(f"{resource} reserve", arena.reserve))

        names = ("release", "restore")
        wrapped: Any = Wrapped(memory, **{name: by_resource(memory, name) for name in names})
        return replace(backend, memory=wrapped, create_host_arena=create_arena)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "copy_runs", fuse.around("kv copy", cache.copy_runs))
        size = {"buffer_size_gb": pool_gb(model, num_blocks)}
        return tiny_engine(causal_lm, change_backend=change, **size, **config), fuse


def failing_steps(
    next_fault: Callable[[], str | None], *, overlaps: bool = False
) -> Callable[[Backend], Backend]:
    """A change of a backend: each step fails as `next_fault` says, at "launch" or at "fetch".

    One that fails at "fetch" has run. `overlaps`: the host runs ahead of the device.
    """

    def change(backend: Backend) -> Backend:
        executor = backend.executor

        def launch(*args: Any) -> Any:
            fault = next_fault()
            if fault == "launch":
                raise RuntimeError("no launch")
            fetch = executor.launch(*args)

            def refuse() -> Any:
                fetch()
                raise RuntimeError("no result")

            return refuse if fault == "fetch" else fetch

        wrapped: Any = Wrapped(executor, launch=launch)
        wrapped.overlaps = overlaps or executor.overlaps
        return replace(backend, executor=wrapped)

    return change
