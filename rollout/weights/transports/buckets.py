"""Buckets: tensors' bytes sent through one buffer, each bucket announced by a header.

A sender copies tensors into its buffer and sends the buffer when it is full. The bytes of one
tensor in one bucket are a chunk. A receiver creates each tensor at its first chunk, and copies the
chunks of each bucket into the tensors. Each header has the hash of its bucket's bytes. Sender and
receiver hash all headers, so that one checksum verifies the whole push.

A BucketPath delivers buckets to the members of a group: Broadcasts by torch.distributed,
SharedBucket through shared memory. Used by `rollout.weights.transports.collective`.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rollout.backends.process_groups import join_group
from rollout.backends.shared_buffer import (
    DEVICE,
    HOST,
    SharedBuffer,
    close_shared_buffer,
    create_shared_buffer,
    open_shared_buffer,
)
from rollout.errors import WeightUpdateError
from rollout.weights.fingerprints import FingerprintOf, fingerprint_on

SHARED_PLACES = (HOST, DEVICE)
_ITEM = 8  # a bucket's size is a multiple of this many bytes
_POLL_S = 0.001
_JOIN_S = 60.0  # time limit for members to connect, which have all arrived before


# ---- tensors to buckets and back


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [start, start + num_bytes) of one tensor. The chunks of a bucket are adjacent."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class BucketHeader(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Announces a bucket of `num_bytes` bytes, a multiple of 8. `hash` is the hash of its bytes."""

    chunks: tuple[Chunk, ...]
    num_bytes: int
    hash: int


class PushEnd(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Ends a push of `num_buckets` buckets. `checksum` is the checksum of all headers. `fault` says
    why the push ended early; "" if the push is complete."""

    num_buckets: int
    checksum: str
    fault: str = ""


class BucketWriter:
    """Packs tensors into a buffer, and sends the buffer when it is full."""

    def __init__(self, buffer_N: Tensor, send: Callable[[bytes, Tensor], None]) -> None:
        """`buffer_N` is uint8, with a multiple of 8 bytes. `send` is called with each encoded
        header and its bucket, uint8 [num_bytes]. The buffer is filled again when `send` has
        returned."""
        self._buffer_N, self._send = buffer_N, send
        self._fingerprint = fingerprint_on(buffer_N.device)
        self._chunks: list[Chunk] = []
        self._digest = hashlib.blake2b(digest_size=8)
        self._end = self._num_buckets = 0

    def write(self, name: str, values: Tensor) -> None:
        """Append a contiguous tensor, and send the buckets that it fills. Raises the errors of
        `send`."""
        bytes_N = values.reshape(-1).view(torch.uint8)
        dtype, shape = str(values.dtype).removeprefix("torch."), tuple(values.shape)
        start = 0
        while start < values.nbytes or not start:
            size = min(values.nbytes - start, len(self._buffer_N) - self._end)
            self._buffer_N[self._end : self._end + size].copy_(bytes_N[start : start + size])
            self._chunks.append(Chunk(name, dtype, shape, start, size))
            self._end, start = self._end + size, start + size
            if self._end == len(self._buffer_N):
                self._flush()
            if not values.nbytes:
                return

    def end(self) -> PushEnd:
        """Send the last bucket, if it is not empty. Return the message that ends the push."""
        if self._chunks:
            self._flush()
        return PushEnd(self._num_buckets, self._digest.hexdigest())

    def _flush(self) -> None:
        num_bytes = -(-self._end // _ITEM) * _ITEM
        self._buffer_N[self._end : num_bytes].zero_()
        bucket_N = self._buffer_N[:num_bytes]
        header = BucketHeader(tuple(self._chunks), num_bytes, _hash(self._fingerprint, bucket_N))
        encoded = msgspec.msgpack.encode(header)
        self._digest.update(encoded)
        self._chunks, self._end = [], 0
        self._num_buckets += 1
        self._send(encoded, bucket_N)


class BucketReader:
    """Creates tensors on a device from the buckets that arrive. After a fault it accepts the
    remaining buckets, so that sender and receivers stay in step, but does not copy their bytes.
    `finish` raises the fault."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._fingerprint = device, fingerprint_on(device)
        self._tensors: dict[str, tuple[Chunk, Tensor]] = {}
        self._num_read: dict[str, int] = {}
        self._digest = hashlib.blake2b(digest_size=8)
        self._num_buckets = 0
        self._fault: str = ""

    def read(self, encoded: bytes, header: BucketHeader, bucket_N: Tensor) -> None:
        """Copy a bucket, uint8 [num_bytes], into its tensors. `encoded` is the header as it
        arrived."""
        self._digest.update(encoded)
        self._num_buckets += 1
        if not self._fault and _hash(self._fingerprint, bucket_N) != header.hash:
            names = f"{header.chunks[0].name!r} to {header.chunks[-1].name!r}"
            self._fault = f"bucket {self._num_buckets}, of {names}, does not match its hash"
        start = 0
        for chunk in header.chunks:
            end = start + chunk.num_bytes
            self._fault = self._fault or self._copy(chunk, bucket_N[start:end])
            start = end

    def _copy(self, chunk: Chunk, bytes_N: Tensor) -> str:
        """Copy a chunk into its tensor. Return why it cannot be copied, or ""."""
        first, tensor = self._tensors.get(chunk.name) or (chunk, None)
        if tensor is None:
            dtype = getattr(torch, chunk.dtype, None)
            if not isinstance(dtype, torch.dtype):
                return f"{chunk.name!r} has the unknown dtype {chunk.dtype!r}"
            tensor = torch.empty(chunk.shape, dtype=dtype, device=self._device)
            self._tensors[chunk.name] = chunk, tensor
        num_read = self._num_read.get(chunk.name, 0)
        is_next = chunk.start == num_read and len(bytes_N) == chunk.num_bytes
        if not is_next or (chunk.dtype, chunk.shape) != (first.dtype, first.shape):
            return f"a chunk of {chunk.name!r} is not the next one"
        end = num_read + chunk.num_bytes
        if end > tensor.nbytes:
            return f"{chunk.name!r} has more bytes than {math.prod(chunk.shape)} {chunk.dtype}"
        tensor.reshape(-1).view(torch.uint8)[num_read:end].copy_(bytes_N)
        self._num_read[chunk.name] = end
        return ""

    def finish(self, end: PushEnd) -> dict[str, Tensor]:
        """Return the tensors by name. Raises WeightUpdateError for a fault and for an incomplete
        push."""
        if end.fault:
            raise WeightUpdateError(f"the sender ended the push: {end.fault}")
        fault, checksum = self._fault, self._digest.hexdigest()
        if not fault and (self._num_buckets, checksum) != (end.num_buckets, end.checksum):
            fault = (
                f"{self._num_buckets} buckets with the checksum {checksum} have arrived, "
                f"not {end.num_buckets} with {end.checksum}"
            )
        if not fault:
            short = [n for n, (_, t) in self._tensors.items() if self._num_read[n] != t.nbytes]
            fault = f"only a part of {short[0]!r} has arrived" if short else ""
        if fault:
            raise WeightUpdateError(f"{fault}; the serving weights are kept")
        return {name: tensor for name, (_, tensor) in self._tensors.items()}


def _hash(fingerprint: FingerprintOf, bucket_N: Tensor) -> int:
    """Return the hash of a bucket's bytes."""
    # As float32, which is hashed fastest, and by its bits.
    return int(fingerprint(bucket_N.view(torch.float32), torch.float32)[0])


# ---- buckets to the members of a group


class BucketPath(Protocol):
    """Delivers buckets from a sender to the members of a group. The sender calls `buffer` and
    `send`. Members call `receive` and `taken`. After a RuntimeError or OSError of a method the
    group cannot be used."""

    @property
    def device(self) -> torch.device: ...

    @property
    def address(self) -> str:
        """Address of the sender's buffer, which members open; "" if they need no address."""
        ...

    def buffer(self, num_bytes: int) -> Tensor:
        """Return the buffer that the sender fills, uint8 [num_bytes]. All buckets use the same
        buffer."""
        ...

    def send(self, bucket_N: Tensor, key: str, check: Callable[[], None], timeout_s: float) -> None:
        """Send the filled buffer, and return when it can be filled again. `key` is the bucket's key
        in the store. `check` can be called meanwhile, and can raise to cancel."""
        ...

    def receive(self, num_bytes: int, timeout_s: float) -> Tensor:
        """Return the next bucket, uint8 [num_bytes], which is valid until `taken` is called."""
        ...

    def taken(self, key: str) -> None:
        """Report to the sender that this member has copied the bucket `key`."""
        ...

    def close(self) -> None: ...


class Broadcasts:
    """`BucketPath` by broadcasts of a torch.distributed group. Rank 0 is the sender."""

    address = ""

    def __init__(
        self, store: Any, name: str, backend: str, rank: int, size: int, own_host: str
    ) -> None:
        """Join the group `name` and wait for all ranks. Other ranks connect to this rank at
        `own_host`."""
        distributed: Any = dist  # its type hints lack PrefixStore
        own_store, timeout = distributed.PrefixStore(f"{name}/", store), timedelta(seconds=_JOIN_S)
        self._group, self.device = join_group(backend, own_store, rank, size, timeout, own_host)
        self._buffer_N: Tensor | None = None

    def buffer(self, num_bytes: int) -> Tensor:
        """Return the first `num_bytes` of the buffer. Allocate a larger buffer if needed."""
        if self._buffer_N is None or len(self._buffer_N) < num_bytes:
            self._buffer_N = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer_N[:num_bytes]

    def send(self, bucket_N: Tensor, key: str, check: Callable[[], None], timeout_s: float) -> None:
        """Broadcast the bucket. `key` and `check` are not used."""
        self.broadcast(bucket_N, timeout_s)

    def receive(self, num_bytes: int, timeout_s: float) -> Tensor:
        """Receive the broadcast bucket into this member's buffer and return it."""
        bucket_N = self.buffer(num_bytes)
        self.broadcast(bucket_N, timeout_s)
        return bucket_N

    def taken(self, key: str) -> None:
        """No-op: the broadcast has copied the bucket to this member's buffer."""

    def close(self) -> None:
        """No-op: the group is freed with its last reference."""

    def broadcast(self, bytes_N: Tensor, timeout_s: float) -> None:
        """Send contiguous bytes from rank 0, or receive them. Raises RuntimeError if it fails."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        self._group.broadcast([bytes_N], options).wait()


class SharedBucket:
    """`BucketPath` through the sender's buffer, which all members map. Members count in the store
    how many of them have copied a bucket."""

    def __init__(self, store: Any, place: str, num_bytes: int, num_members: int) -> None:
        """Create the sender's buffer at `place`, HOST or DEVICE."""
        self._store, self._num_members = store, num_members
        self._shared: SharedBuffer | None = create_shared_buffer(place, num_bytes)
        self._bytes_N = self._shared.bytes_N
        self.address = self._shared.address

    @classmethod
    def opened(cls, store: Any, place: str, address: str, num_bytes: int) -> SharedBucket:
        """Open the sender's buffer at `address`, for a member."""
        bucket = cls.__new__(cls)
        bucket._store, bucket._num_members, bucket._shared = store, 0, None
        bucket._bytes_N = open_shared_buffer(place, address, num_bytes)
        bucket.address = address
        return bucket

    @property
    def device(self) -> torch.device:
        return self._bytes_N.device

    def buffer(self, num_bytes: int) -> Tensor:
        return self._bytes_N[:num_bytes]

    def send(self, bucket_N: Tensor, key: str, check: Callable[[], None], timeout_s: float) -> None:
        """Wait until all members have copied the bucket, which is in the buffer already. Raises
        RuntimeError at the timeout."""
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
        """Return the bucket in the sender's buffer, without a copy."""
        return self._bytes_N[:num_bytes]

    def taken(self, key: str) -> None:
        """Wait until the copies out of the buffer have ended, then count this member."""
        if self.device.type != "cpu":
            # Not the whole device: that would break a graph capture in another thread.
            torch.accelerator.current_stream(self.device).synchronize()
        self._store.add(f"{key}/taken", 1)

    def close(self) -> None:
        """Close the sender's buffer, which no further member can open then. No-op for a member."""
        if self._shared is not None:
            close_shared_buffer(self._shared)
            self._shared = None
