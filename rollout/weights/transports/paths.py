"""How a bucket comes from the sender to the members of its group: broadcast, or read in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.backends.memory.shared_buffer import (
    DEVICE,
    HOST,
    SharedBuffer,
    close_shared_buffer,
    create_shared_buffer,
    open_shared_buffer,
)
from rollout.backends.process_groups import connected_group

SHARED_PLACES = (HOST, DEVICE)
_POLL_S = 0.001
_MEET_S = 60.0  # all are there already, and connect


class BucketPath(Protocol):
    """The sender's end, or a member's. What it raises, RuntimeError or OSError, ends the group."""

    @property
    def device(self) -> torch.device: ...

    @property
    def address(self) -> str:
        """What members need to open their end, "" if nothing."""
        ...

    def buffer(self, num_bytes: int) -> Tensor:
        """The sender fills it, uint8 [num_bytes]; the same one for each bucket."""
        ...

    def send(self, bucket_N: Tensor, key: str, check: Callable[[], None], timeout_s: float) -> None:
        """Return when the buffer may be filled again. `key`: of the bucket, in the store. `check`
        is called while it waits, and may raise."""
        ...

    def receive(self, num_bytes: int, timeout_s: float) -> Tensor:
        """The bucket, uint8 [num_bytes], valid until `taken`."""
        ...

    def taken(self, key: str) -> None:
        """The member has read the bucket."""
        ...

    def close(self) -> None: ...


class Broadcasts:
    """A group of torch.distributed, of which the sender is rank 0."""

    address = ""

    def __init__(
        self,
        store: Any,
        name: str,
        backend: str,
        rank: int,
        size: int,
        own_host: str,
    ) -> None:
        """`own_host`: where the others reach this rank. Returns when all have come."""
        distributed: Any = dist
        places, timeout = distributed.PrefixStore(f"{name}/", store), timedelta(seconds=_MEET_S)
        self._group, self.device = connected_group(backend, places, rank, size, timeout, own_host)
        self._buffer_N: Tensor | None = None

    def buffer(self, num_bytes: int) -> Tensor:
        """It grows where it has to, and stays."""
        if self._buffer_N is None or len(self._buffer_N) < num_bytes:
            self._buffer_N = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer_N[:num_bytes]

    def send(self, bucket_N: Tensor, key: str, check: Callable[[], None], timeout_s: float) -> None:
        """Broadcast it."""
        self._broadcast(bucket_N, timeout_s)

    def receive(self, num_bytes: int, timeout_s: float) -> Tensor:
        """Take part in the broadcast."""
        bucket_N = self.buffer(num_bytes)
        self._broadcast(bucket_N, timeout_s)
        return bucket_N

    def taken(self, key: str) -> None:
        """Nothing: the bucket has been copied here."""

    def close(self) -> None:
        """Nothing: the group ends with its last reference."""

    def _broadcast(self, bytes_N: Tensor, timeout_s: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        self._group.broadcast([bytes_N], options).wait()


class SharedBucket:
    """One buffer of the sender, which all members map; each says when it has read a bucket."""

    def __init__(self, store: Any, place: str, num_bytes: int, num_members: int) -> None:
        """The sender's end."""
        self._store, self._num_members = store, num_members
        self._shared: SharedBuffer | None = create_shared_buffer(place, num_bytes)
        self._bytes_N = self._shared.bytes_N
        self.address = self._shared.address

    @classmethod
    def opened(cls, store: Any, place: str, address: str, num_bytes: int) -> SharedBucket:
        """A member's end."""
        bucket = cls.__new__(cls)
        bucket._store, bucket._num_members, bucket._shared = store, 0, None
        bucket._bytes_N = open_shared_buffer(place, address, num_bytes)
        bucket.address = address
        return bucket

    @property
    def device(self) -> torch.device:
        return self._bytes_N.device

    def buffer(self, num_bytes: int) -> Tensor:
        """All of it, which has that size."""
        return self._bytes_N[:num_bytes]

    def send(self, bucket_N: Tensor, key: str, check: Callable[[], None], timeout_s: float) -> None:
        """Wait until all members have read it."""
        deadline = time.monotonic() + timeout_s
        while (num_taken := int(self._store.add(f"{key}/taken", 0))) < self._num_members:
            check()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._num_members - num_taken} of {self._num_members} engines have not "
                    f"read it within {timeout_s:g} s"
                )
            time.sleep(_POLL_S)

    def receive(self, num_bytes: int, timeout_s: float) -> Tensor:
        """Where it lies."""
        return self._bytes_N[:num_bytes]

    def taken(self, key: str) -> None:
        """Tell the sender, once the copies out of the buffer are done."""
        if self.device.type != "cpu":
            # Not for the device: a step that is being captured beside this would be lost.
            torch.accelerator.current_stream(self.device).synchronize()
        self._store.add(f"{key}/taken", 1)

    def close(self) -> None:
        """The sender's end: let nobody open it any more."""
        if self._shared is not None:
            close_shared_buffer(self._shared)
            self._shared = None
