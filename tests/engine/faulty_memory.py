"""Parts of a backend that fail once at a chosen point, before or after doing their work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rollout import DynamicInferenceEngine


class InjectedFault(RuntimeError):
    """What a fault raises."""


class Fuse:
    """Blows at the named point, once, if armed. `passed` has the points that it was asked about."""

    def __init__(self) -> None:
        self.armed: str | None = None
        self.passed: set[str] = set()

    def check(self, point: str) -> None:
        self.passed.add(point)
        if self.armed == point:
            self.armed = None
            raise InjectedFault(point)


class Faulty:
    """Delegates to `part`; each of `methods` may fail before or after its work."""

    def __init__(self, part: Any, owner: str, methods: tuple[str, ...], fuse: Fuse) -> None:
        self._part, self._owner, self._methods, self._fuse = part, owner, methods, fuse

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._part, name)
        if name not in self._methods:
            return target

        def call(*args: Any) -> Any:
            self._fuse.check(f"{self._owner} {name}")
            result = target(*args)
            self._fuse.check(f"{self._owner} {name}, done")
            return result

        return call


KV_POINTS = tuple(
    f"kv {name}{done}"
    for name in ("release", "restore", "reserve", "_move")
    for done in ("", ", done")
)
WEIGHT_POINTS = tuple(
    f"weights {name}{done}"
    for name in ("release", "restore", "reserve", "refresh", "release_packed")
    for done in ("", ", done")
)


def install(engine: DynamicInferenceEngine) -> Fuse:
    """Put a fuse into everything that a suspend or a resume calls."""
    fuse = Fuse()
    kv, store = engine._kv, engine._weights
    memory = ("release", "restore")
    kv._memory = Faulty(kv._memory, "kv", memory, fuse)
    kv._arena = Faulty(kv._arena, "kv", ("reserve",), fuse)
    kv._move = Faulty(SimpleNamespace(_move=kv._move), "kv", ("_move",), fuse)._move
    store._memory = Faulty(store._memory, "weights", memory, fuse)
    store._arena = Faulty(store._arena, "weights", ("reserve",), fuse)
    store._model = Faulty(store._model, "weights", ("refresh", "release_packed"), fuse)
    return fuse
