"""The rendezvous of a collective push, where its sender and the engines agree on their group.

It is a torch store of the sender. For each push an engine says that it has arrived, and which group
it still has. Once as many have arrived as the coordinator asked, the sender publishes the plan: the
group, and each engine's rank in it. While the same engines come with the same group, the group
stays. The id of a push begins with its number, so that an engine that comes late knows that the
push is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

OVER = "over"  # key of the number of the last push whose other keys were removed
_POLL_S = 0.002, 0.02  # the first pause and the longest one
T = TypeVar("T")


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """An engine that has arrived at a push. group: name of the group that it has, "" for none."""

    engine: str
    group: str


class GroupPlan(msgspec.Struct, frozen=True, array_like=True):
    """The group of a push.

    engines: ids of ranks 1, 2, ...; the sender is rank 0. backend: of torch.distributed, or the
    place of a SharedBucket, whose `address` engines open. stall_s: how long one bucket may take
    once it is announced. fault: why there is no group, "" if there is.
    """

    group: str
    engines: tuple[str, ...]
    backend: str
    bucket_bytes: int
    stall_s: float = 0.0
    fault: str = ""
    address: str = ""


def wait_for(store: Any, key: str, check: Callable[[], object]) -> bytes:
    """Return the value of `key` once it is in the store.

    `check` is called meanwhile, and may raise. Raises RuntimeError if the store has closed.
    """
    pause_s, longest_s = _POLL_S
    while not store.check([key]):
        check()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return bytes(store.get(key))


def put(store: Any, key: str, value: Any) -> None:
    """Write a message to the store. Raises RuntimeError if the store has closed."""
    store.set(key, msgspec.msgpack.encode(value))


def read(encoded: bytes, kind: type[T]) -> T:
    """Decode a message. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(encoded, type=kind)
