"""SentTransport: a base of transports that send a push to a process group and keep no weights.

Members of a push meet in the sender's TCPStore, by `put`, `wait_for` and `read`. Used by
`rollout.weights.transports.collective` and by vLLM's weight transfer (`rollout_vllm`). Listens at a
TCP port.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from rollout.errors import ConfigError, WeightUpdateError
from rollout.parallel.stores import open_store
from rollout.weights.source import WeightsSource

OVER = "over"  # key of the number of the last push whose other keys were removed
_POLL_S = 0.002, 0.02  # the first and the longest pause between checks
T = TypeVar("T")


def wait_for(store: Any, key: str, check: Callable[[], object]) -> bytes:
    """Wait until `key` is in the store, and return its value. `check` is called meanwhile, and can
    raise to cancel. Raises RuntimeError if the store is closed."""
    pause_s, longest_s = _POLL_S
    while not store.check([key]):
        check()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return bytes(store.get(key))


def put(store: Any, key: str, value: Any) -> None:
    """Encode `value` and write it to the store. Raises RuntimeError if the store is closed."""
    store.set(key, msgspec.msgpack.encode(value))


def read(encoded: bytes, kind: type[T]) -> T:
    """Decode a message of type `kind`. Raises msgspec.MsgspecError if it is malformed."""
    return msgspec.msgpack.decode(encoded, type=kind)


class RolledBackError(WeightUpdateError):
    """The push was rolled back while it was sent."""


class SentPush(Protocol):
    """A push of a SentTransport. `is_over`: it was rolled back, or has ended."""

    is_over: bool

    @property
    def source(self) -> WeightsSource: ...


P = TypeVar("P", bound=SentPush)


class SentTransport(ABC, Generic[P]):
    """Base of a WeightTransport, without `kind`, `publish` and `send`, whose engines receive a push
    while `send` runs. An engine that joins the fleet later gets no requests until the next push."""

    def __init__(self, host: str, store_timeout_s: float) -> None:
        """Listen at `host`. Raises ConfigError if that is not possible."""
        try:
            self._store, self._port = open_store(host, store_timeout_s)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"no engine can reach weights at {host!r}: {error}") from error
        put(self._store, OVER, 0)
        self._num_pushes = 0
        self._sending = threading.Lock()  # held while a push is sent
        self._push: P | None = None
        self._unsent: P | None = None  # the push that `send` will send
        self.committed: WeightsSource | None = None

    def _start(self, push: P) -> WeightsSource:
        """Make `push` the running one. Returns its source."""
        self._push = self._unsent = push
        return push.source

    def _take(self, source: WeightsSource) -> P:
        """Return the push to send, also if it was rolled back meanwhile."""
        push, self._unsent = self._unsent, None
        assert push is not None, "it was published"
        assert push.source is source, "and nothing after it"
        return push

    def commit(self) -> None:
        """Record the source as committed. The weights themselves are not kept."""
        if self._push is not None:
            self.committed, self._push = self._push.source, None

    def roll_back(self) -> None:
        """End the push. A running `send` sends nothing further and returns."""
        push, self._push = self._push, None
        if push is not None:
            push.is_over = True

    def close(self) -> None:
        """End a running push, leave the group and close the store. A second call does nothing."""
        self.roll_back()
        with self._sending:
            self._leave()
            self._store = self.committed = None

    @abstractmethod
    def _leave(self) -> None:
        """Leave the group of the push before; no-op without a group."""

    def _check(self, push: P) -> None:
        """Raise RolledBackError if the push is over."""
        if push.is_over or self._store is None:
            raise RolledBackError("the push was rolled back")
