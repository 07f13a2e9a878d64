"""Meeting: where the sender of a collective push and the engines agree on their group.

A TCPStore of the sender. For each push the engines say who they are and which group they still
have; once as many have come as the coordinator has ordered, the sender names the group and each
one's rank in it. While the same engines come, with the same group, it stays. The id of a push
begins with its number, by which engines that come too late know that it is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

OVER = "over"  # the key of the last push whose other keys are gone
_POLL_S = 0.002, 0.02  # the first pause and the longest one
T = TypeVar("T")


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """An engine that has come to a push. group: the one it has, "" for none."""

    engine: str
    group: str


class GroupPlan(msgspec.Struct, frozen=True, array_like=True):
    """The group of a push. engines: of ranks 1, 2, ...; the sender is rank 0. fault: why there is
    no group. backend: of torch.distributed, or the place of a SharedBucket, at `address`. stall_s:
    how long one bucket may take once it is announced."""

    group: str
    engines: tuple[str, ...]
    backend: str
    bucket_bytes: int
    stall_s: float = 0.0
    fault: str = ""
    address: str = ""


def wait_for(store: Any, key: str, check: Callable[[], object]) -> bytes:
    """The value of `key`, once it is there. `check` is called now and then, and may raise. Raises
    RuntimeError if the store has gone."""
    pause_s, longest_s = _POLL_S
    while not store.check([key]):
        check()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return bytes(store.get(key))


def put(store: Any, key: str, value: Any) -> None:
    """Raises RuntimeError if the store has gone."""
    store.set(key, msgspec.msgpack.encode(value))


def read(encoded: bytes, kind: type[T]) -> T:
    """Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(encoded, type=kind)
